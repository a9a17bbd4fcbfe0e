"""A feature head on rank 0 of a target over several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from specdec.engine.eagle.model import EagleTarget
from specdec.engine.eagle.pairs import PairChunk, slots_of
from specdec.engine.loading.model import load_model
from tests.support.eagle_heads import random_head
from tests.support.engine_models import Driver, random_tokens
from tests.support.ranks import Followers

BLOCK_SIZE = 16
TEXT = random_tokens(40, 1)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_head_over_ranks_is_that_of_one(
    architecture: str, followers: Followers, tiny_folder: Callable[..., Path]
) -> None:
    """Claim: rank 0 holds the whole head: its features, embeddings and passes over two ranks give the logits of one
    rank but for the order of sums, and the other ranks run no pass.

    Source: hidden states are whole on every rank. Conclusive: the embeddings are cut over the ranks, so a lookup in the
    share alone would differ for half of the ids; logits are compared after every text position in the cells.
    """
    folder = tiny_folder(architecture, tie_word_embeddings=True)
    found = []
    for model in (load_model(str(folder)), followers.lead(folder, 2)):
        driver = Driver(EagleTarget(model, random_head(), is_packed=False), block_size=BLOCK_SIZE)
        table = driver.open(64)
        for start, end in ((0, 25), (25, 26), (26, 40)):
            driver.step([(table, TEXT[start:end], 1)])
        cells = numpy.arange(1, 40)
        features = driver.model.storage.read(slots_of(table.block_ids, cells - 1, BLOCK_SIZE))
        chunk = PairChunk(table.block_ids, cells, 40, TEXT[1:], features)
        found.append(driver.model.run_pass([chunk], range(39)).logits)
    difference = float((found[0] - found[1]).abs().max())
    assert 0 < difference < 2e-3 * float(found[0].abs().max())
