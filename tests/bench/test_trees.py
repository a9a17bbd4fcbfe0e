"""Trees over chains from given turns: which plans are compared, and by which number."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.results import Results, read_results
from bench.texts import pooled, pooled_ratio
from bench.trees import AUTO_CHAINS, AUTO_TREES, BENCHMARK, CHAINS, TREES
from tests.support.variants import RULES_DEFAULT

CELL = {"pair": "deepened", "rule": RULES_DEFAULT[1]}
CHAIN, (BEST, OTHER) = CHAINS[1].name, (own.name for own in TREES[8][:2])


@pytest.fixture
def results() -> Results:
    """Three texts: one of 100 tokens, two of 10, each with the steps of its plan."""
    found = Results({"command": ""})
    for tokens, steps in ((100, (50, 25, 50)), (10, (5, 5, 2)), (10, (5, 5, 2))):
        own = dict.fromkeys((TREES[4][0].name, TREES[16][0].name), tokens) | dict(zip((CHAIN, BEST, OTHER), steps))
        for variant, count in own.items():
            found.add(CELL, variant, {"tokens": tokens, "steps": count, "tokens_per_s": tokens / count})
        for variant, rate in ((AUTO_CHAINS, 10.0), (AUTO_TREES, 12.0)):
            found.add(CELL, variant.name, {"tokens": tokens, "steps": tokens, "tokens_per_s": rate})
    return found


def test_tokens_of_a_step_are_those_of_all_texts_together(results: Results) -> None:
    """Claim: a ratio divides all tokens by all steps, so a long text counts as its tokens do. Source: by medians of
    texts the command chose another tree and printed 1.054 for 1.125. Conclusive: the median would choose the other
    tree, and is above this ratio; the interval of equal texts is their ratio itself."""
    assert pooled(results, CELL, CHAIN, "tokens", "steps") == 2.0
    assert pooled(results, CELL, BEST, "tokens", "steps") == 120 / 35
    assert pooled(results, CELL, OTHER, "tokens", "steps") == 120 / 54
    ratio = pooled_ratio(results, CELL, BEST, CHAIN)
    assert ratio is not None and ratio.median == 120 / 35 / 2
    assert 1.0 <= ratio.low < ratio.median < ratio.high <= 2.0
    equal = Results({})
    for _ in range(3):
        equal.add(CELL, OTHER, {"tokens": 10, "steps": 2})
        equal.add(CELL, CHAIN, {"tokens": 10, "steps": 5})
    same = pooled_ratio(equal, CELL, OTHER, CHAIN)
    assert same is not None and (same.median, same.low, same.high) == (2.5, 2.5, 2.5)
    assert pooled_ratio(equal, CELL, BEST, CHAIN) is None, "not measured"


def test_the_best_tree_is_compared_with_the_best_chain_of_no_more_rows(results: Results, tmp_path: Path) -> None:
    """Claim: bars and table are of the best tree of each number of rows, by all texts, over the best chain that has no
    more, and of `auto`, also from the JSON. Conclusive: known counts; at 8 rows the goal is missed in no way, at 4 and
    16 rows the trees are worse than the chain."""
    (at_4, at_8, at_16, auto) = BENCHMARK.bars(results)
    assert f"{BEST} / {CHAIN}" in at_8.shown
    assert (at_8.reached, at_8.bound, at_8.state) == (120 / 35 / 2, 1.12, "met")
    assert (at_4.reached, at_16.reached, auto.reached) == (0.5, 0.5, 1.2)
    results.write(tmp_path / "trees.json")
    (table,), (read,) = BENCHMARK.tables(results), BENCHMARK.tables(read_results(tmp_path / "trees.json"))
    assert read == table and table.rows[0][2].startswith("1.71 [")
    assert table.rows[0][4] == "1.20 [1.20, 1.20]"
