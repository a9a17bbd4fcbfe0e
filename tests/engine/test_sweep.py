"""Draft length × batch × context × chunking × ranks: every combination gives the bits of one row run alone.

tests/engine/test_row_independence.py separates the causes at few positions; this sweep combines them, on the shipped
target, far beyond splits of attention and chunks of prompts. Through the services: tests/sameness.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from specdec.engine.cache.kv_cache import BlockTable
from specdec.engine.interface import CausalModel
from specdec.engine.loading.model import load_model
from tests.support.engine_models import Driver, random_tokens
from tests.support.harness import TARGET_MODEL
from tests.support.ranks import Followers

LENGTH = 660
CONTEXTS = (640, 600, 513, 512, 511, 400, 300, 257, 256, 255, 200, 129, 128, 127, 100, 65, 64, 63, 17, 5, 1, 0)
DRAFT_LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
BATCHES = (1, 2, 3, 5, 8, 16)
CHUNKS = (1, 5, 16, 33, 64, 128, 512)
RANKS = (1, 2)


@contextlib.contextmanager
def model_on(rank_count: int, dtype: str) -> Iterator[CausalModel]:
    """The shipped target on `rank_count` ranks, one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    followers = Followers()
    try:
        if rank_count == 1:
            yield load_model(str(TARGET_MODEL), dtype)
        else:
            yield followers.lead(TARGET_MODEL, rank_count, dtype)
    finally:
        followers.stop()
        torch.set_num_threads(before)


def fed(driver: Driver, token_ids: list[int], chunk_size: int) -> tuple[BlockTable, torch.Tensor]:
    """A table with the text in it, run alone in chunks of `chunk_size`, and the logits of all positions."""
    table = driver.open(LENGTH)
    starts = range(0, len(token_ids), chunk_size)
    rows = [driver.feed(table, token_ids[start : start + chunk_size]) for start in starts]
    return table, torch.cat(rows)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank_count", RANKS)
def test_every_combination_gives_the_same_bits(rank_count: int, dtype: str) -> None:
    """Claim: logits are the same bits for every draft length, batch, context and chunking.

    Conclusive: all 22 contexts × 11 draft lengths × 6 batches, members of a batch at other contexts and with other
    draft lengths, a prompt's chunk of another text beside every third; half of the verifications come after a wrong one
    that was rolled back. Every row is compared with the text run alone in chunks of 64.
    """
    with model_on(rank_count, dtype) as model:
        driver = Driver(model, block_count=1 + (max(BATCHES) + 1) * -(-LENGTH // 16))
        vocabulary_size = model.description.vocabulary_size
        token_ids = random_tokens(LENGTH, 5, vocabulary_size)
        wrong = random_tokens(max(DRAFT_LENGTHS) + 1, 6, vocabulary_size)
        other, _ = fed(driver, random_tokens(300, 7, vocabulary_size), 64)
        tables: list[BlockTable] = []
        reference = torch.empty(0)
        for index in range(max(BATCHES)):
            table, logits = fed(driver, token_ids, 64 if index == 0 else CHUNKS[index % len(CHUNKS)])
            reference = logits if index == 0 else reference
            assert torch.equal(logits, reference), f"chunks of {CHUNKS[index % len(CHUNKS)]}"
            tables.append(table)
        for step in range(len(CONTEXTS) + len(tables)):
            places = [
                CONTEXTS[min(step - index, len(CONTEXTS) - 1)] if index <= step else None
                for index in range(len(tables))
            ]
            members = [(table, place) for table, place in zip(tables, places) if place is not None]
            for table, place in members:
                driver.cache.truncate(table, place)
            for draft_length in DRAFT_LENGTHS:
                for batch in BATCHES:
                    check_step(driver, members[-batch:], draft_length, token_ids, wrong, other, reference)


def check_step(
    driver: Driver,
    members: list[tuple[BlockTable, int]],
    draft_length: int,
    token_ids: list[int],
    wrong: list[int],
    other: BlockTable,
    reference: torch.Tensor,
) -> None:
    """One step of verifications: the first member's has `draft_length`, those of the others vary around it."""
    lengths = [1 + (draft_length + 3 * index) % 17 for index in range(len(members))]
    feeds = [(table, token_ids[place : place + n], n) for (table, place), n in zip(members, lengths)]
    if draft_length % 2:
        driver.step([(table, wrong[: len(ids)], len(ids)) for table, ids, _ in feeds])
        for table, place in members:
            driver.cache.truncate(table, place)
    beside = [(other, wrong[:11], 0)] if (draft_length + len(members)) % 3 == 0 else []
    logits = driver.step([*feeds, *beside]).logits
    row = 0
    for (table, place), (_, ids, _) in zip(members, feeds):
        expected = reference[place : place + len(ids)]
        assert torch.equal(logits[row : row + len(ids)], expected), f"{len(ids)} rows at {place}, {len(feeds)} members"
        row += len(ids)
        driver.cache.truncate(table, place)
    driver.cache.truncate(other, 300)
