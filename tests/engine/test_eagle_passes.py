"""Passes of an EAGLE-3 head over the cells of its target are the plain network over whole texts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor

from specdec.engine.eagle import model as eagle_model
from specdec.engine.eagle.model import EagleTarget
from specdec.engine.eagle.network import EagleHead
from specdec.engine.eagle.pairs import PairChunk, slots_of
from specdec.engine.interface import Chunk, RaggedBatch
from specdec.engine.loading.model import load_model
from tests.support.device_models import load_on_device
from tests.support.eagle_heads import WholeText, features_of, random_head
from tests.support.engine_models import DIFFERENT, Driver, random_tokens, without_kernels

TEXT, OTHER = random_tokens(75, 1), random_tokens(20, 2)
BLOCK_SIZE = 16
NONE = numpy.zeros(0, numpy.int64)


def with_head(folder: Path, head: EagleHead, way: str = "kernels", dtype: str = "float32", is_packed: bool = False):
    """A target with a head, and its driver: on kernels, by plain modules on a CPU, or as on a GPU."""
    if way == "device":
        with mock.patch.object(eagle_model, "kernels", lambda: None):
            return Driver(EagleTarget(load_on_device(folder, with_graphs=True), head, is_packed), block_size=BLOCK_SIZE)
    plain = mock.patch.object(eagle_model, "kernels", lambda: None) if way == "plain" else nullcontext()
    with without_kernels() if way == "plain" else nullcontext(), plain:
        return Driver(EagleTarget(load_model(str(folder), dtype), head, is_packed), block_size=BLOCK_SIZE)


def read(driver: Driver, text: list[int], *ends: int):
    """A table with a text, read in parts that end there."""
    table = driver.open(len(text) + 40)
    for start, end in zip((0, *ends), (*ends, len(text))):
        driver.step([(table, text[start:end], 1)])
    return table


def pairs(driver: Driver, table, text: list[int], positions: range, paths=(), path_tokens=(), x=()) -> PairChunk:
    """A chunk of pairs of committed positions, and of others with features of their own."""
    cells = numpy.arange(positions.start, positions.stop)
    features = driver.model.storage.read(slots_of(table.block_ids, cells - 1, BLOCK_SIZE))
    token_ids = [*(text[position] for position in positions), *path_tokens]
    both = torch.cat([features, *(one[None] for one in x)])
    return PairChunk(table.block_ids, cells, positions.stop, token_ids, both, paths)


KINDS = [
    *((architecture, way, False, False) for architecture in DIFFERENT for way in ("kernels", "plain", "device")),
    *(("llama", way, *others) for way in ("kernels", "plain") for others in ((True, False), (True, True))),
]


@pytest.mark.parametrize(("architecture", "way", "has_embeddings", "norm_before_residual"), KINDS)
def test_a_pass_is_the_network(
    architecture: str, way: str, has_embeddings: bool, norm_before_residual: bool, folder_of: Callable[[str], Path]
) -> None:
    """Claim: x and logits of pairs in cells, computed in parts beside another sequence, and of a tree of pairs in
    scratch slots that read x, are those of the network over each whole path; on kernels and by modules, with embeddings
    of the head or the target's.

    Source: Li et al. 2025, section 3.1, by `EagleHead` and features of `transformers`. Conclusive: float32 with 1e-4 of
    the largest value, while a pair left out, or a position shifted by one, changes logits by more than a tenth of it,
    which is asserted.
    """
    head = random_head(norm_before_residual=norm_before_residual, has_embeddings=has_embeddings)
    whole = WholeText(
        folder_of(architecture),
        architecture,
        random_head(norm_before_residual=norm_before_residual, has_embeddings=has_embeddings),
    )
    driver = with_head(folder_of(architecture), head, way)
    model = driver.model
    table, other = read(driver, TEXT, 40, 41), read(driver, OTHER)
    model.run_pass([pairs(driver, table, TEXT, range(1, 50))], [])
    found = model.run_pass(
        [pairs(driver, other, OTHER, range(1, 20)), pairs(driver, table, TEXT, range(50, 75))], [18, 43]
    )
    assert found.is_finite.all()
    assert_near(found.logits, [whole.logits(OTHER), whole.logits(TEXT)], head)
    scratch = model.storage.scratch_start
    # a tree behind the text: 5 and 6 below the last pair, 7 below 6
    first = model.run_pass(
        [pairs(driver, table, TEXT, range(75, 75), [[scratch], [scratch + 9]], [5, 6], [found.x[43]] * 2)], [0, 1]
    )
    assert_near(first.logits, [whole.logits(TEXT, [5]), whole.logits(TEXT, [6])], head)
    last = model.run_pass(
        [pairs(driver, table, TEXT, range(75, 75), [[scratch + 9, scratch + 1]], [7], [first.x[1]])], [0]
    )
    assert_near(last.logits, [whole.logits(TEXT, [6, 7])], head)
    assert float((whole.logits(TEXT, [6, 7]) - whole.logits(TEXT[1:], [6, 7]))[head.target_ids].abs().max()) > 0.1


def assert_near(ours: Tensor, theirs: list[Tensor], head: EagleHead, tolerance: float = 1e-4) -> None:
    expected = torch.stack(theirs)[:, head.target_ids]
    assert float((ours - expected).abs().max()) < tolerance * float(expected.abs().max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounded_weights_and_types_stay_near_the_network(dtype: str, folder_of: Callable[[str], Path]) -> None:
    """Claim: with weights of 8 bits, and in a type of 16 bits, logits are those of the network but for roundings: their
    likeliest token is among its first three. Conclusive: the error is between bounds of the rounding's size; unrounded
    float32 weights would be nearer."""
    driver = with_head(folder_of("llama"), random_head(), dtype=dtype, is_packed=True)
    whole = WholeText(folder_of("llama"), "llama", random_head())
    table = read(driver, TEXT)
    found = driver.model.run_pass([pairs(driver, table, TEXT, range(1, 75))], [73])
    expected = whole.logits(TEXT)[random_head().target_ids]
    error = float((found.logits[0] - expected).abs().max() / expected.abs().max())
    assert 1e-4 < error < 0.1
    assert int(found.logits[0].argmax()) in expected.topk(3).indices.tolist()


@pytest.mark.parametrize("way", ["kernels", "plain"])
def test_the_target_keeps_its_bits(way: str, folder_of: Callable[[str], Path]) -> None:
    """Claim: a loaded head and its passes leave every logit of the target as it is. Conclusive: bits of prompts,
    decodes and a tree are compared with those of the model alone, passes between them."""
    folder = folder_of("llama")
    with without_kernels() if way == "plain" else nullcontext():
        alone = Driver(load_model(str(folder)), block_size=BLOCK_SIZE)
    driver = with_head(folder, random_head(), way)
    found = []
    for each in (alone, driver):
        table = each.open(128)
        logits = [each.step([(table, TEXT[:33], 4)]).logits]
        if each is driver:
            each.model.run_pass([pairs(each, table, TEXT, range(1, 33))], [31])
        logits.append(each.step([(table, TEXT[33:34], 1)]).logits)
        each.cache.prepare_write(table, 40)
        tree = Chunk(table.block_ids, 34, [3, 4, 5], 3, [[34], [35], [35, 36]])
        logits.append(each.model.forward(RaggedBatch((tree,))).logits)
        found.append(torch.cat(logits))
    assert torch.equal(*found)


def test_cells_carry_features_and_pairs(folder_of: Callable[[str], Path]) -> None:
    """Claim: a move or copy of cells takes features and pairs along; cells that are written again lose their pairs, and
    zeroed cells both. Conclusive: contents of every slot concerned are compared."""
    driver = with_head(folder_of("llama"), random_head())
    storage = driver.model.storage
    table = read(driver, TEXT)
    driver.model.run_pass([pairs(driver, table, TEXT, range(1, 60))], [])
    slots = slots_of(table.block_ids, numpy.arange(75), BLOCK_SIZE)
    assert storage.has_pair[slots].tolist() == [False] + [True] * 59 + [False] * 15
    before = storage.features[slots].clone()
    driver.cache.truncate(table, 50)
    driver.cache.move(table, [59, 60, 58], [50, 51, 59])
    assert storage.has_pair[slots[50:60]].tolist() == [True, False, *[True] * 8]
    assert torch.equal(storage.features[slots[[50, 51, 59]]], before[[59, 60, 58]])
    keys = storage.pairs.keys[0].movedim(3, 1).flatten(0, 1)
    assert torch.equal(keys[slots[50]], keys[slots[59]]) is False and keys[slots[50]].any()
    driver.step([(table, TEXT[50:55], 1)])
    assert storage.has_pair[slots[49:57]].tolist() == [True] + [False] * 5 + [True] * 2
    storage.scrub(table.block_ids[0], 2, 5)
    assert not storage.features[slots[2:5]].any() and not storage.has_pair[slots[2:5]].any()
    assert storage.features[slots[[1, 5]]].any() and storage.has_pair[slots[[1, 5]]].all()


def test_pairs_that_are_no_numbers_are_not_kept(folder_of: Callable[[str], Path]) -> None:
    """Claim: a pair of a feature that is not-a-number has its flag at 0, and is not in its cell afterwards, nor its
    not-a-number in any slot. Conclusive: on kernels the neighbour's pair is there, in the same block."""
    for way in ("kernels", "plain"):
        driver = with_head(folder_of("llama"), random_head(), way)
        model = driver.model
        table = read(driver, TEXT[:20])
        slots = slots_of(table.block_ids, numpy.arange(20), BLOCK_SIZE)
        chunk = pairs(driver, table, TEXT, range(1, 3), [[model.storage.scratch_start]], [5], [torch.zeros(64)])
        chunk.features[1:] = torch.nan
        result = model.run_pass([chunk], [0, 1])
        is_kept = way == "kernels"  # plain torch multiplies what a pair does not see by zero
        assert result.is_finite.tolist() == [is_kept, False, False]
        assert model.storage.has_pair[slots[1:3]].tolist() == [is_kept, False]
        for own in (model.storage.pairs.keys, model.storage.pairs.values):
            assert bool(torch.isfinite(own[0] if isinstance(own, list) else own).all())


def test_features_are_reduced_for_every_row(folder_of: Callable[[str], Path]) -> None:
    """Claim: the cell of every position holds f = fc(features) of it. Conclusive: compared with `transformers` at all
    positions, in float32."""
    driver = with_head(folder_of("llama"), random_head())
    table = read(driver, TEXT, 30)
    found = driver.model.storage.read(slots_of(table.block_ids, numpy.arange(75), BLOCK_SIZE))
    expected = random_head().fc(features_of(folder_of("llama"), "llama", TEXT))
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())
