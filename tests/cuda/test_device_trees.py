"""A tree of draft tokens on the device backend: each row has the logits that its path would have as a chain.

As tests/engine/test_target_trees.py, whose tree this is, on the code of a GPU, to the rounding of another order of
additions: there a row's bits may depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from specdec.engine.cuda import plan as plan_module
from specdec.engine.cuda.plan import StepTensors
from specdec.engine.cuda.storage import DeviceStorage
from specdec.engine.interface import Chunk, RaggedBatch
from specdec.engine.kv_cache import KVCache
from specdec.engine.runner import Piece
from specdec.protocol.shape import branches, path_tokens
from tests.cuda.test_device_engine import TOLERANCE
from tests.cuda.test_no_waiting import NoWaitingCopies
from tests.engine.test_target_trees import NODE_COUNT, PARENTS, Chains, run_tree, tree_piece
from tests.support.device_models import device_driver
from tests.support.engine_models import Driver, make_tiny_model, random_tokens

MODELS = ("llama", "gemma2", "gpt2")  # gemma2: windows and capped scores
BASES = (1, 15, 16, 17, 90)  # committed lengths around block borders, and beyond the window
PARTS = branches(PARENTS, NODE_COUNT)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders = {name: make_tiny_model(tmp_path_factory.mktemp(name) / name, name) for name in MODELS}
    return folders.__getitem__


def largest_difference(chains: Chains, rows: torch.Tensor, tokens: list[int]) -> float:
    """The largest difference of a tree's rows from those of its paths as chains; NaN is infinity."""
    worst = 0.0
    for part, path in zip(PARTS, path_tokens(PARTS, tokens)):
        first, chain = part.start + 1 if part.start else 0, chains.rows(path)
        difference = (rows[first : part.end + 1] - chain[part.depth + (part.start > 0) :]).abs().max()
        worst = max(worst, float(difference.nan_to_num(nan=torch.inf)))
    return worst


def check_tree(driver: Driver, base: int, neighbours: list[Piece[None]], with_graphs: bool) -> None:
    """Raises AssertionError unless a tree after `base` tokens, and the text after one of its paths, has the logits of
    chains, in a step captured or not."""
    text, tokens = random_tokens(base, base), random_tokens(NODE_COUNT, 1000 + base)
    table = driver.open(base + 40)
    if base > 1:
        driver.feed(table, text[:-1], 1)
    piece, blocks = tree_piece(driver, table, text[-1], tokens)
    rows = run_tree(driver, piece, neighbours)
    chunks = [chunk for each in (*neighbours, piece) for chunk in each.chunks(driver.cache.block_size)]
    shape = driver.model.backend.plan(RaggedBatch(tuple(chunks)))
    assert shape.copy_count and (shape in driver.model.backend._graphs) == with_graphs
    chains = Chains(driver, text)
    assert largest_difference(chains, rows, tokens) < TOLERANCE
    path = path_tokens(PARTS, tokens)[4]
    driver.cache.continue_on(table, blocks[3], base + len(path))
    after = random_tokens(3, 7)
    found, wanted = driver.feed(table, after), chains.rows([*path, *after])[len(path) + 1 :]
    assert float((found - wanted).abs().max()) < TOLERANCE
    chains.close()
    for branch in blocks:
        driver.cache.drop_branch(branch)
    driver.cache.release(table)
    driver.cache.check_integrity()


@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("name", MODELS)
def test_each_row_has_the_logits_of_its_path(name: str, with_graphs: bool, folder_of: Callable[[str], Path]) -> None:
    """Claim: shape, siblings and committed length change no row of a tree, alone and behind a long neighbour, in steps
    of their own shape and in padded ones; and after a branch is kept, the text goes on as that path does.
    Conclusive: ten nodes on six paths, on both sides of block borders, with other tokens each time; the next test shows
    what a row moves by if one copy is missing."""
    driver = device_driver(folder_of(name), with_graphs, sequences_max=8)
    longest = driver.open(300)
    driver.feed(longest, random_tokens(280, 13), 1)
    for base in BASES:
        check_tree(driver, base, [Piece(longest, 280, [1, 2, 3], 3, None)] if base % 2 else [], with_graphs)
    storage = driver.model.backend._storage
    assert all(not layer[:, 0].any() for layer in storage.layers), "the zero block was written to"


def without_the_last(self: RaggedBatch) -> Iterator[tuple[Chunk, list[int]]]:
    """`RaggedBatch.copied_rows` but for the last path's, which is one."""
    yield from list(COPIED_ROWS(self))[:-1]


def all_of_the_root(tensors: StepTensors, batch: RaggedBatch, block_size: int) -> None:
    """`fill_copies` with the root's row for every copy."""
    FILL_COPIES(tensors, batch, block_size)
    tensors.sources[tensors.shape.row_count :] = 0


def of_nothing(tensors: StepTensors, batch: RaggedBatch, block_size: int) -> None:
    """`fill_copies` of a batch without copies."""
    FILL_COPIES(tensors, RaggedBatch(()), block_size)


COPIED_ROWS, FILL_COPIES = RaggedBatch.copied_rows, plan_module.fill_copies
FAULTS = {
    "one copy left out": (RaggedBatch, "copied_rows", without_the_last),
    "no copies": (plan_module, "fill_copies", of_nothing),
    "copies of the root": (plan_module, "fill_copies", all_of_the_root),
    "no committed positions": (KVCache, "begin_branches", lambda self, table, branches: None),
}


@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_can_fail(
    fault: str, with_graphs: bool, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault moves a row by more than a hundred tolerances."""
    driver = device_driver(folder_of("llama"), with_graphs, sequences_max=8)
    text, tokens = random_tokens(20, 3), random_tokens(NODE_COUNT, 2)
    table = driver.open(60)
    driver.feed(table, text[:-1], 1)
    owner, name, broken = FAULTS[fault]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        piece, _ = tree_piece(driver, table, text[-1], tokens)
        rows = run_tree(driver, piece)
    assert largest_difference(Chains(driver, text), rows, tokens) > 100 * TOLERANCE


def test_blocks_of_branches_are_copied_without_waiting() -> None:
    """Claim: the block where branches begin is copied to them, and nothing waits for the device."""
    meta = torch.device("meta")
    with NoWaitingCopies():
        DeviceStorage(2, 8, 16, 2, 4, torch.bfloat16, meta).copy_block(1, [2, 5])
    storage = DeviceStorage(2, 8, 16, 2, 4, torch.bfloat16, torch.device("cpu"))
    for layer in storage.layers:
        layer[:, 1] = torch.randn(layer[:, 1].shape)
    storage.copy_block(1, [2, 5])
    for layer in storage.layers:
        used = [index for index in range(9) if layer[:, index].any()]
        assert used == [1, 2, 5] and torch.equal(layer[:, 2], layer[:, 1]) and torch.equal(layer[:, 5], layer[:, 1])
