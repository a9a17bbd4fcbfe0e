"""Proposers without a draft model, from given turns."""

from __future__ import annotations

from pathlib import Path

from bench.no_draft import ANOTHER, BENCHMARK, COPYING, LOCAL, PROSE, RIGHT, WARM, WRONG, spoiled
from bench.results import Results, read_results
from tests.support.variants import OFF

RATES = {OFF.name: 10.0, LOCAL: 20.0, WARM: 40.0, RIGHT: 30.0, WRONG: 9.0, ANOTHER: 10.0}


def test_ways_are_compared_with_plain_decoding(tmp_path: Path) -> None:
    """Claim: every way is over plain decoding of the same prompts; of what cannot help the slowest counts; the JSON
    says the same. Conclusive: known rates."""
    results = Results({"command": ""})
    for kind in (COPYING, PROSE):
        for name, rate in RATES.items():
            results.add({"prompts": kind}, name, {"tokens_per_s": rate, "tokens": 60, "steps": 30})
    copying, predicted, useless = BENCHMARK.bars(results)
    assert [bar.reached for bar in (copying, predicted, useless)] == [2.0, 3.0, 0.9]
    assert useless.state == "missed" and f"{COPYING}, {WRONG}" in useless.shown and ANOTHER not in useless.shown
    results.write(tmp_path / "no_draft.json")
    (table,), (read,) = BENCHMARK.tables(results), BENCHMARK.tables(read_results(tmp_path / "no_draft.json"))
    rows = {row[0]: list(row[1:]) for row in table.rows}
    assert read == table and rows[RIGHT] == ["2.00", "30", "3.00 [3.00, 3.00]", "30", "3.00 [3.00, 3.00]"]


def test_a_prediction_is_wrong_where_it_is_said() -> None:
    """Claim: every tenth token is another one, or every one."""
    assert [place for place, token in enumerate(spoiled(range(25), 10)) if token != place] == [9, 19]
    assert all(token != place for place, token in enumerate(spoiled(range(25), 1)))
