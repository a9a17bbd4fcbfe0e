"""`python -m bench.gpu` runs with torch and transformers alone, from checks to measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu_host

ROOT = Path(__file__).resolve().parents[2]
# All dependencies of the project, but for torch, transformers and their own dependencies.
ABSENT = "grpc google.protobuf pydantic pydantic_core structlog rich uvloop matplotlib pytest hypothesis".split()
PROGRAM = """
import runpy, sys
sys.modules.update(dict.fromkeys({absent!r}))  # a module that is None there cannot be imported, nor found
sys.argv = ["bench.gpu", *sys.argv[1:]]
runpy.run_module("bench.gpu", run_name="__main__")
"""


def test_the_hosts_part_of_a_step_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: `python -m bench.gpu_host` times plans of all steps and says which bars hold."""
    assert gpu_host.main(["--rounds", "3", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(gpu_host.STEPS) and sum("bar" in line for line in lines) == len(gpu_host.BARS_US)


@pytest.mark.more
@pytest.mark.lengthy
def test_the_small_run_needs_torch_and_transformers_only(tmp_path: Path) -> None:
    """Claim: with every other dependency of the project hidden, the whole script runs: all checks pass, every step is
    timed with graphs and without, and the margin report is there. Conclusive: importing a hidden package raises.
    """
    file = tmp_path / "gpu.json"
    program = PROGRAM.format(absent=ABSENT)
    command = [sys.executable, "-c", program, "--small", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    measurements = json.loads(file.read_text())
    assert len(measurements["checks"]) == 5 and all(check["passed"] for check in measurements["checks"])
    shapes = {(step["sequences"], step["rows"], step["paths"], step["with_graphs"]) for step in measurements["steps"]}
    assert shapes == {(*shape, g) for shape in ((1, 1, 1), (1, 3, 1), (2, 2, 1), (1, 8, 4)) for g in (True, False)}
    assert all(step["step_ms"] > 0 and step["limit_ms"] > 0 for step in measurements["steps"])
    (margins,) = measurements["margins"]
    assert margins["positions"] > 0 and margins["close"] <= margins["positions"] and margins["way"] == "plain"
