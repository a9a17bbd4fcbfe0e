"""A tree of draft tokens on the device backend: each row has the logits that its path would have as a chain.

As tests/engine/test_target_trees.py, whose tree this is, on the code of a GPU, to the rounding of another order of
additions: there a row's bits may depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec.engine.cache.kv_cache import KVCache
from specdec.engine.cuda import plan as plan_module
from specdec.engine.cuda.plan import StepTensors
from specdec.engine.cuda.storage import DeviceStorage
from specdec.engine.interface import Chunk, RaggedBatch
from specdec.protocol.tree_shape import branches, path_tokens
from tests.cuda.test_device_engine import TOLERANCE
from tests.cuda.test_no_waiting import NoWaitingCopies
from tests.engine.test_target_trees import COMMITTED, NODE_COUNT, PARENTS, Chains, go_on, run_tree, tree_chunk
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


def check_tree(driver: Driver, base: int, neighbours: list[Chunk], with_graphs: bool) -> None:
    """Raises AssertionError unless a tree after `base` tokens, and the text after one of its paths, has the logits of
    chains."""
    text, tokens = random_tokens(base, base), random_tokens(NODE_COUNT, 1000 + base)
    table = driver.open(base + 40)
    if base > 1:
        driver.feed(table, text[:-1], 1)
    chunk = tree_chunk(driver, table, text[-1], tokens)
    rows = run_tree(driver, table, chunk, neighbours)
    shape = driver.model.backend.plan(RaggedBatch((*neighbours, chunk)))
    assert shape.has_trees and (shape in (driver.model.backend._graphs or ())) == with_graphs
    chains = Chains(driver, text)
    assert largest_difference(chains, rows, tokens) < TOLERANCE
    go_on(driver, table, COMMITTED)
    path, after = [tokens[node] for node in COMMITTED], random_tokens(3, 7)
    found, wanted = driver.feed(table, after), chains.rows([*path, *after])[len(path) + 1 :]
    assert float((found - wanted).abs().max()) < TOLERANCE
    chains.close()
    driver.cache.release(table)
    driver.cache.check_integrity()


@pytest.mark.parametrize("kind", ["target", "target, graphs", "draft, captured"])
@pytest.mark.parametrize("name", MODELS)
def test_each_row_has_the_logits_of_its_path(name: str, kind: str, folder_of: Callable[[str], Path]) -> None:
    """Claim: shape, siblings and committed length change no row of a tree, alone and behind a long neighbour, of a
    target, whose trees have a shape of their own, and of a draft, whose steps are padded to captured ones; and after
    rows are accepted, the text goes on as their path does. Conclusive: ten nodes on six paths, on both sides of block
    borders, with other tokens each time; the next test shows what a row moves by if one key is missing."""
    is_draft = kind.startswith("draft")
    driver = device_driver(folder_of(name), kind != "target", sequences_max=8, has_stable_rows=not is_draft)
    longest = driver.open(300)
    driver.feed(longest, random_tokens(280, 13), 1)
    for base in BASES:
        neighbour = [Chunk(longest.block_ids, 280, [1, 2, 3], 3)] if base % 2 else []
        check_tree(driver, base, neighbour, is_draft)
    storage = driver.model.backend._storage
    assert all(not layer[:, 0].any() for layer in storage.layers), "the zero block was written to"


def without_a_key(tensors: StepTensors, batch: RaggedBatch) -> None:
    """`fill_trees` but for the first key of the last row's path."""
    FILL_TREES(tensors, batch)
    chunk = batch.chunks[-1]
    tensors.visible[batch.row_count - 1, chunk.paths[-1][0]] = 0


def of_other_rows(tensors: StepTensors, batch: RaggedBatch) -> None:
    """`fill_trees` where every row also sees the first node."""
    FILL_TREES(tensors, batch)
    chunk = batch.chunks[-1]
    tensors.visible[: batch.row_count, chunk.paths[0][0]] = 1


FILL_TREES = plan_module.fill_trees
FAULTS = {
    "a key left out": (plan_module, "fill_trees", without_a_key),
    "a sibling seen": (plan_module, "fill_trees", of_other_rows),
    "no committed positions": (KVCache, "move", lambda self, table, sources, destinations: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_can_fail(fault: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault moves a row by more than a hundred tolerances."""
    driver = device_driver(folder_of("llama"), False, sequences_max=8)
    text, tokens = random_tokens(20, 3), random_tokens(NODE_COUNT, 2)
    table = driver.open(60)
    driver.feed(table, text[:-1], 1)
    owner, name, broken = FAULTS[fault]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        rows = run_tree(driver, table, tree_chunk(driver, table, text[-1], tokens))
        go_on(driver, table, COMMITTED)
    chains = Chains(driver, text)
    path = [tokens[node] for node in COMMITTED]
    after = (driver.feed(table, [1]) - chains.rows([*path, 1])[-1:]).abs().max()
    assert max(largest_difference(chains, rows, tokens), float(after)) > 100 * TOLERANCE


def test_slots_are_copied_all_at_once_without_waiting() -> None:
    """Claim: slots that change places do not overwrite each other, and nothing waits for the device."""
    meta = torch.device("meta")
    with NoWaitingCopies():
        DeviceStorage(2, 8, 16, 2, 4, torch.bfloat16, meta).copy_slots([17, 40], [40, 17])
    storage = DeviceStorage(2, 8, 16, 2, 4, torch.bfloat16, torch.device("cpu"))
    for layer in storage.layers:
        layer[:, 1:3] = torch.randn(layer[:, 1:3].shape)
    before = [layer.clone() for layer in storage.layers]
    storage.copy_slots([17, 40], [40, 17])
    for layer, was in zip(storage.layers, before):
        expected = was.clone()
        expected[:, 1, 1], expected[:, 2, 8] = was[:, 2, 8], was[:, 1, 1]
        assert torch.equal(layer, expected) and not torch.equal(layer, was)
