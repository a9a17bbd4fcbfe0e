"""A row's logits after prefix reuse and after eviction are the bits of a text fed alone from nothing.

Issue 3, point 4. The reference is one sequence fed in chunks of 64; sums in another order would differ in the last bits
of some of hundreds of logits at every row with near certainty, so equality is no accident.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specdec.engine.block_table import BlockTable
from tests.support.engine_models import Driver, random_tokens

LENGTH = 200
CHUNKS = (64, 31)  # of those who publish, in turn
MODELS = [("target", "float32"), ("target", "bfloat16"), ("llama", "float32"), ("gpt2", "bfloat16"), ("odd", "float32")]


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: "-".join(model))
def driver(request: pytest.FixtureRequest, driver_of: Callable[..., Driver]) -> Driver:
    torch.set_num_threads(1)
    return driver_of(*request.param)


def run(driver: Driver, table: BlockTable, token_ids: list[int], chunk_size: int) -> torch.Tensor:
    """Logits of all rows from the table's length on, in chunks: [rows, vocab] float32."""
    starts = range(table.length, len(token_ids), chunk_size)
    return torch.cat([driver.feed(table, token_ids[start : start + chunk_size]) for start in starts])


def test_rows_after_what_was_found_are_the_same_bits(driver: Driver) -> None:
    """Claim: a text whose beginning another sequence left in the cache, fed in whatever chunks, gives the logits of one
    fed from nothing: behind one block, behind many, with the last token alone fed again, and after an eviction at any
    length that was published in several pieces.

    Source: issue 3, "numbers that do not depend on neighbours ... after prefix reuse and after eviction". Conclusive:
    every row from the found length on is compared with torch.equal, and the found length is the one expected, so the
    rows did stand on what was found.
    """
    cache, size = driver.cache, driver.cache.block_size
    text = random_tokens(LENGTH, 5, driver.model.description.vocabulary_size)
    alone = cache.open(LENGTH)
    reference = run(driver, alone, text, 64)
    cache.release(alone)
    for salt, chunk_size in zip("ab", CHUNKS):
        first = cache.open(LENGTH, salt)
        run(driver, first, text, chunk_size)
        cache.publish(first, text, LENGTH)
        for length in (size, 5 * size, LENGTH - LENGTH % size):
            beside = cache.open(LENGTH, salt)
            assert cache.adopt(beside, text[:length]) == length
            assert torch.equal(run(driver, beside, text, 50), reference[length:]), f"{length} tokens were found"
            cache.truncate(beside, length - 1)
            assert torch.equal(driver.feed(beside, text[length - 1 : length]), reference[length - 1 : length])
            cache.release(beside)
        cache.vacate(first)
        assert cache.adopt(first, text) == LENGTH - LENGTH % size
        cache.truncate(first, 3 * size + 1)
        assert torch.equal(run(driver, first, text, 64), reference[3 * size + 1 :]), "it was evicted"
        cache.release(first)
    cache.check_integrity()


def test_evicted_and_fed_again_beside_others_is_the_same(driver: Driver) -> None:
    """Claim: a sequence that lost all its blocks and is fed again from its tokens, in other blocks, beside others and
    in other chunks, goes on with the same bits.

    Source: design section 1, "eviction and crash are open it again". Conclusive: its old blocks are held by another
    sequence when it is fed again, so nothing of them can be left.
    """
    cache = driver.cache
    text = random_tokens(LENGTH, 6, driver.model.description.vocabulary_size)
    evicted, other = cache.open(LENGTH), cache.open(LENGTH)
    reference = run(driver, evicted, text, 64)
    old = list(evicted.block_ids)
    cache.vacate(evicted)
    driver.feed(other, random_tokens(LENGTH - 10, 7, driver.model.description.vocabulary_size), 1)
    assert set(other.block_ids) & set(old)
    rows = []
    while evicted.length < LENGTH:
        piece = text[evicted.length : evicted.length + 23]
        rows.append(driver.step([(other, [1], 0), (evicted, piece, len(piece))]).logits)
    assert torch.equal(torch.cat(rows), reference)
    for table in (evicted, other):
        cache.release(table)
    cache.check_integrity()
