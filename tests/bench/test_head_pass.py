"""`python -m bench.head_pass`: a small target and a head of random weights, and the bars."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.head_pass import PassMeasurement, bars_of, main

from bench.results import ratio_of
from tests.support.harness import TARGET_MODEL


@pytest.mark.more
def test_passes_and_steps_take_turns(tmp_path: Path) -> None:
    """Claim: steps with and without a head and passes of all numbers of rows are timed, and the results have the bars.

    Conclusive: a step that loads twelve layers cannot take less than a thousandth of one pass of one layer.
    """
    flags = ["--models", str(TARGET_MODEL), "--draft-vocabulary", "512", "--threads", "1", "--turns", "3"]
    assert main([*flags, "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "head_pass.json").read_text(encoding="utf-8"))
    (found,) = written["measurements"]
    assert found["step_ms"] > 0 and set(found["pass_ms"]) == {"1", "4", "8"}
    assert 0 < found["pass_over_step"]["median"] < 1000 > found["loaded_over_plain"]["median"] > 0
    assert [bar["reached"] for bar in written["bars"]] == [
        found["pass_over_step"]["median"],
        found["loaded_over_plain"]["median"],
    ]


def test_the_bars_are_of_the_worst_target() -> None:
    """Claim: a pass may take 0.12 of a step, a loaded head 1.02 of it. Conclusive: made-up ratios on both sides."""
    sides = [(0.11, 1.01), (0.13, 1.03)]
    found = [
        PassMeasurement(f"{index}", 1, 10.0, {1: 1.0}, ratio_of([one] * 9), ratio_of([other] * 9))
        for index, (one, other) in enumerate(sides)
    ]
    assert [[bar.state for bar in bars_of(found[:count])] for count in (1, 2)] == [["met"] * 2, ["missed"] * 2]
