"""`python -m bench.gpu_session`: the command for a GPU runs here with tiny shapes; its ratios and bars are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.gpu_session.__main__ import Run, main
from bench.gpu_session.results import Results, bars_of, completed
from bench.gpu_session.stages import MINUTES, STAGES, Stage
from tests.support.interpreter import needs_triton

ROOT = Path(__file__).resolve().parents[2]
# What no machine needs for the engine's own stages; a package that raises stands in its place.
ABSENT = "grpc pydantic pydantic_core structlog uvloop matplotlib".split()
WITHOUT_SERVICES = {"sameness"}


def step(model: str, rows: int, step_ms: float, **others: Any) -> dict[str, Any]:
    """A row of the stage `steps`, as one is reported: 1 GB is read."""
    about = {"way": "kernels", "dependent_launch": False, "texts": 1, "paths": 1, "is_long": False, "bytes": 10**9}
    return {"model": model, "rows": rows, "step_ms": step_ms, "forward_ms": step_ms - 0.125} | about | others


def test_bars_follow_from_what_stages_report() -> None:
    """Claim: every bar of the table is the ratio that its name says: of the slowest of 1 to 8 rows, to the time of
    reading at the speed of this session; by kernels and without dependent launch unless it says so.

    Conclusive: all numbers are powers of two times the speed's, so ratios are exact; other ways' rows are slower.
    """
    rows = [step("1B", 1, 2.0), step("1B", 4, 3.0), step("1B", 8, 2.5), step("1B", 8, 2.75, paths=4)]
    rows += [step("1B", 1, 2.75, is_long=True, bytes=15 * 10**8), step("1B", 8, 99.0, texts=8)]
    rows += [step("1B", 1, 99.0, way="modules"), step("1B", 1, 1.0, dependent_launch=True)]
    rows += [{"check": "replays with dependent launch", "model": "1B", "rows": 400, "equal": 399}]
    bits = [{"check": "widths", "model": "8B", "width": 17, "rows": 512, "equal": 500}]
    host = [{"model": "1B", "rule": rule, "step_ms": ms, "forward_ms": 1.0} for rule, ms in (("GREEDY", 2.0),)]
    host += [{"model": "1B", "rule": "COUPLED, top-p 0.95", "step_ms": 2.25, "forward_ms": 1.0}]
    host += [{"way": "kernels", "texts": 32, "rows": 4, "fill_us": 96.0, "send_us": 32.0}]
    peer, texts = [{"model": "1B", "rows": 1, "step_ms": 4.0}], [{"tokens": 2560, "differing_prompts": 2}]
    reported = {"bandwidth": [{"gb_per_s": 1000.0}], "bits": bits, "steps": rows, "host": host}
    reported |= {"sameness": texts, "peer": peer}
    stages = [{"stage": name, "results": [completed(row, 1000.0) for row in own]} for name, own in reported.items()]
    results = Results(stages)
    bars = {bar.claim: bar for stage in STAGES for bar in bars_of(stage.name, results) if bar.reached is not None}
    assert {claim: (bar.reached, bar.state) for claim, bar in bars.items()} == {
        "rows with other bits in another step": (12, "missed"),
        "1B, 1 to 8 rows: step / reading": (3.0, "missed"),
        "1B, 1 to 8 rows: forward / reading": (2.875, "missed"),
        "1B, 1 to 8 rows, dependent launch: step / reading": (1.0, "stretch"),
        "1B, 1 to 8 rows, dependent launch: forward / reading": (0.875, "stretch"),
        "outside the forward, GREEDY, one stream, ms": (0.125, "met"),
        "outside the forward, GREEDY, one stream, dependent launch, ms": (0.125, "met"),
        "8 rows over 1": (1.25, "missed"),
        "tree of 8 on 4 paths over a chain": (1.1, "missed"),
        "8,192 tokens: added time / reading the added cache": (1.5, "met"),
        "replays with dependent launch that differ": (1, "missed"),
        "fill and send, 32 x 4 rows, us": (128.0, "met"),
        "COUPLED, top-p 0.95, one row, over GREEDY, ms": (0.25, "met"),
        "step / transformers, static cache, compiled": (0.5, "stretch"),
        "texts that differ with speculation, bits of log-probabilities too": (2, "missed"),
    }
    assert "17 12" in bars["rows with other bits in another step"].shown


def test_stages_and_minutes_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: another stage, and no time, are refused by value and limit before anything starts."""
    for arguments, reason in (
        (["--stages", "speed"], "'speed'; it must be one of bandwidth, bits,"),
        (["--minutes", "0"], "above 0"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert reason in capsys.readouterr().err


@pytest.mark.more
@pytest.mark.lengthy
def test_a_stage_that_fails_or_is_late_is_recorded_and_the_next_goes_on(tmp_path: Path) -> None:
    """Claim: a stage that raises, one over its time and one that finds no time left are in the file with their reasons
    when they end, and others run after them. Conclusive: the file is read after each."""
    file = tmp_path / "session.json"
    run = Run(MINUTES, True, file, Console(file=open(os.devnull, "w")))
    late, raising = Stage("bandwidth", 0.01, "late"), Stage("stages", 400, "it has no function of that name")
    expected = [
        (late, "not done after 0 s"),
        (raising, "AttributeError: module"),
        (Stage("bandwidth", 400, "sound"), None),
    ]
    try:
        for stage, reason in expected:
            run.stage(stage)
            record = json.loads(file.read_text())["stages"][-1]
            assert record["done"] == (reason is None) and (record["reason"] or "").startswith(reason or "")
        run._until_s = 0.0
        run.stage(late)
    finally:
        run.close()
    found = json.loads(file.read_text())
    assert found["stages"][-1]["reason"] == "no time is left" and len(found["stages"]) == 4
    (row,) = found["stages"][2]["results"]
    assert row["gb_per_s"] > 0 and row["card"] == found["facts"]["card"]


def small_session(file: Path, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Runs the command; returns how it ended, and the file."""
    command = [sys.executable, "-m", "bench.gpu_session", "--small", "--minutes", "90", "--json", str(file), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment})
    return done, json.loads(file.read_text())


@needs_triton
@pytest.mark.more
@pytest.mark.lengthy
@pytest.mark.timeout(3000)
def test_all_stages_run_on_a_cpu(tmp_path: Path) -> None:
    """Claim: the whole command runs: every stage comes to its end with results that name the card, no row has other
    bits in another step, and each bar that a CPU can measure is measured. Without grpc and pydantic, which a machine
    lent for an hour may lack, all stages but that of the services do, and it says why. Conclusive: packages of their
    names raise where they are imported, in the processes of stages too.
    """
    for name in ABSENT:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ModuleNotFoundError('No module named {name}')\n")
    done, found = small_session(tmp_path / "session.json", PYTHONPATH=str(tmp_path))
    stages = {stage["stage"]: stage for stage in found["stages"]}
    assert list(stages) == [stage.name for stage in STAGES], done.stdout + done.stderr
    for name, stage in stages.items():
        assert stage["done"] == (name not in WITHOUT_SERVICES), (name, stage["reason"], done.stderr)
        assert bool(stage["results"]) == stage["done"]
        assert all(row["card"] == found["facts"]["card"] for row in stage["results"])
    assert done.returncode == 1 and "No module named" in stages["sameness"]["reason"]
    assert "equal bits in every step" in stages["bits"]["results"][0]["numerics"]
    checks = [row for row in stages["bits"]["results"] if "check" in row and "equal" in row]
    assert len(checks) >= 6 and all(row["equal"] == row["rows"] for row in checks)
    kernels = {row["kernel"].split()[0] for row in stages["kernels"]["results"]}
    assert kernels == {"embed", "qkv_rope", "attend", "combine", "product", "rms_norm", "head", "pick"}
    ways = {row["way"] for row in stages["steps"]["results"] if "way" in row}
    assert ways == {"kernels", "modules"}
    assert stages["ranks"]["results"][0]["equal"] == stages["ranks"]["results"][0]["rows"]
    measured = {bar["claim"] for bar in found["bars"] if bar["reached"] is not None}
    assert {"8 rows over 1", "fill and send, 1 x 1 rows, us", "step / transformers, static cache, compiled"} <= measured


@needs_triton
@pytest.mark.more
@pytest.mark.lengthy
@pytest.mark.timeout(1200)
def test_the_stage_of_texts_runs_on_a_cpu(tmp_path: Path) -> None:
    """Claim: with the packages of the services the stage `sameness` runs them, and no text differs; the draft's tokens
    were accepted, so that something was tried."""
    done, found = small_session(tmp_path / "session.json", "--stages", "sameness")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = found["stages"][0]["results"]
    assert (
        row["differing_prompts"] == row["differing_tokens"] == 0 < row["accepted"] and "bfloat16: " in row["numerics"]
    )
