"""What every benchmark of `bench.NAMES` must be able to do."""

from __future__ import annotations

import pytest

from bench import NAMES
from bench.results import Results
from bench.runner import load


@pytest.mark.parametrize("name", NAMES)
def test_results_without_cells_have_tables_and_bars(name: str) -> None:
    """Claim: what was not measured has no rows, and no bar that is met or missed; a benchmark has the name of its
    module, by which its JSON is found."""
    benchmark = load(name)
    assert benchmark.name == name and benchmark.quick_turns < benchmark.turns
    assert {bar.state for bar in benchmark.bars(Results({}))} <= {"not measured"}
    assert all(len(row) == len(table.columns) for table in benchmark.tables(Results({})) for row in table.rows)
