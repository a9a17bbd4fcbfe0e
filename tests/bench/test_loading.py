"""`python -m bench.loading`: a small model's memory, and the bar."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.loading import LoadingMeasurement, bars_of, main

from tests.support.harness import TARGET_MODEL


@pytest.mark.more
def test_a_model_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Claim: a loaded model has its weights in memory, at most no less than that, and the results have the bar.

    Conclusive: less memory than half of its file would be that of a model that is not there.
    """
    assert main(["--models", str(TARGET_MODEL), "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "loading.json").read_text(encoding="utf-8"))
    (found,) = (LoadingMeasurement(**own) for own in written["measurements"])
    assert found.file_bytes == found.largest_file_bytes > 0 and found.seconds > 0
    assert found.peak_bytes >= found.final_bytes > found.file_bytes / 2
    assert [bar["reached"] for bar in written["bars"]] == [found.over_allowed]


def test_the_bar_is_of_the_worst_model() -> None:
    """Claim: 1.15 of the final memory and the largest file are allowed. Conclusive: made-up sizes on both sides."""
    sizes = [(100, 60, 174), (100, 60, 176)]
    found = [LoadingMeasurement(str(peak), whole, largest, peak, 100, 1.0) for whole, largest, peak in sizes]
    assert [bars_of(found[:count])[0].state for count in (1, 2)] == ["met", "missed"]
