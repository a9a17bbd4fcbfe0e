"""Bars: when one is met, which of several values counts, the exit code of a check, and where they are found again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.__main__ import bars_in
from bench.bars import Bar, add_check_flag, against_fixed, as_json, conclude, never_slower, worst_of
from bench.results import Ratio

QUIET = Console(quiet=True)


@pytest.mark.parametrize(
    ("bar", "state"),
    [
        (Bar("a", 1.2, 1.2), "met"),
        (Bar("a", 1.2, 1.19), "missed"),
        (Bar("a", 1.2, 1.5, stretch=1.5), "stretch"),
        (Bar("a", 1.2, 1.2, is_limit=True), "met"),
        (Bar("a", 1.2, 1.21, is_limit=True), "missed"),
        (Bar("a", 1.2, 0.5, is_limit=True, stretch=0.5), "stretch"),
        (Bar("a", 1.2, None), "not measured"),
    ],
)
def test_a_bar_is_met_at_its_bound(bar: Bar, state: str) -> None:
    """Claim: the bound itself is enough, for limits too; without a measurement nothing is met or missed."""
    assert bar.state == state


def test_the_worst_of_several_counts() -> None:
    """Claim: the least value counts, the greatest where the bar is a limit; all are shown, none means unmeasured."""
    values = {"GREEDY": 1.5, "COUPLED": 1.1}
    assert worst_of("a", 1.2, values).reached == 1.1 and worst_of("a", 1.2, values, is_limit=True).reached == 1.5
    assert worst_of("a", 1.2, values).shown == "GREEDY 1.5; COUPLED 1.1"
    assert worst_of("a", 1.2, {}).state == "not measured"


def test_a_check_fails_where_a_bar_is_missed() -> None:
    """Claim: the exit code is 1 only for a missed bar, and only with --check."""
    parser = argparse.ArgumentParser()
    add_check_flag(parser)
    missed, met, unknown = Bar("a", 1.0, 0.9), Bar("b", 1.0, 1.1), Bar("c", 1.0, None)
    assert parser.parse_args(["--check"]).check and not parser.parse_args([]).check
    assert conclude([met, missed], QUIET, True) == 1
    assert conclude([met, missed], QUIET, False) == 0
    assert conclude([met, unknown], QUIET, True) == 0


def test_bars_are_found_again_as_they_were_written(tmp_path: Path) -> None:
    """Claim: `python -m bench --bars` reads each benchmark's bars as they were; without results there are none."""
    assert bars_in(tmp_path) == {}
    bars = [Bar("a", 1.0, 0.9, "x 0.9", stretch=2.0), Bar("b", 1.0, None, is_limit=True)]
    (tmp_path / "fleet.json").write_text(json.dumps({"bars": as_json(bars)}))
    assert bars_in(tmp_path) == {"fleet": bars}


def test_a_cell_is_slower_when_its_whole_interval_is() -> None:
    """Claim: a median below the bar with an interval that reaches it is named and not missed; one wholly below is."""
    wide, fine = Ratio(0.95, 0.9, 0.99, 9), Ratio(1.3, 1.1, 1.5, 9)
    of_off = never_slower({"near": fine, "far": wide})
    assert [bar.state for bar in of_off] == ["met", "met"] and "far 0.950" in of_off[0].shown
    assert never_slower({"near": fine, "far": Ratio(0.95, 0.93, 0.97, 60)})[0].state == "missed"
    assert [bar.state for bar in against_fixed({"near": fine, "far": wide})] == ["stretch", "met"]
    assert {bar.state for bar in (*never_slower({}), *against_fixed({}))} == {"not measured"}
