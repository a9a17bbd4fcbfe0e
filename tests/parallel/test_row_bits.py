"""The promises of `tests/engine/test_row_independence.py` and `test_target_trees.py`, with the same checks, at a fixed
number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine import test_row_independence as independence
from tests.engine import test_target_trees as trees
from tests.support.engine_models import Driver
from tests.support.harness import TARGET_MODEL
from tests.support.ranks import Followers

MODELS = [("target", "float32", 2), ("target", "bfloat16", 2)]
MORE_MODELS = [("target", "bfloat16", 4), ("llama", "float32", 2)]
MORE_MODELS += [(name, "float32", ranks) for name in ("gpt2", "gemma3") for ranks in (2, 4)]
TREE_BASES = (1, 17, 128, 257, 384)  # of those for one rank
PARAMETERS = [*MODELS, pytest.param(("llama", "float32", 4), marks=pytest.mark.more)]
PARAMETERS += [pytest.param(model, marks=pytest.mark.slow) for model in MORE_MODELS]


@pytest.fixture(scope="module", params=PARAMETERS, ids=lambda model: "-".join(map(str, model)))
def case(request: pytest.FixtureRequest, followers: Followers, tiny_folder: Callable[..., Path]) -> independence.Case:
    """A model over ranks, as the tests of one rank take it."""
    name, dtype, rank_count = request.param
    folder = TARGET_MODEL if name == "target" else tiny_folder(name)
    driver = Driver(followers.lead(folder, rank_count, dtype), block_count=200)
    return independence.Case(driver, independence.LENGTH)


@pytest.mark.parametrize(
    "check",
    [
        independence.test_logits_do_not_depend_on_how_a_text_is_fed,
        independence.test_logits_do_not_depend_on_neighbours,
        independence.test_logits_do_not_depend_on_blocks_or_copies,
    ],
    ids=lambda check: check.__name__.removeprefix("test_logits_do_not_depend_on_"),
)
def test_rows_do_not_depend_on_the_batch_over_ranks(check: Callable, case: independence.Case) -> None:
    """Claim (design section 7): partial sums are added in rank order, so a row's bits are its own at any batch.

    Conclusive: torch.equal over hundreds of rows of the same checks that hold for one rank; a sum whose order depended
    on the message size would differ in some rows.
    """
    check(case)


def test_a_tree_has_the_bits_of_its_paths_over_ranks(case: independence.Case) -> None:
    """Claim (design section 10): over ranks too, shape, siblings and committed length change no bit of a tree's row.

    Conclusive: the same check that holds for one rank, with the same tree; a rank that read other keys, or did not
    write a shared row for every path, would add another part to the sums.
    """
    assert case.driver.model.description.tensor_parallel_size > 1
    trees.test_each_row_has_the_bits_of_its_path("", "", TREE_BASES, True, lambda *named: case.driver)
