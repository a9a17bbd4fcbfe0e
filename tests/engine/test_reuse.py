"""A row's logits after prefix reuse and after preemption are the bits of a text fed alone from nothing.

The reference is one sequence fed in chunks of 64; sums in another order would differ in the last bits of some of
hundreds of logits at every row with near certainty, so equality is no accident.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specdec.engine.cache.kv_cache import BlockTable
from tests.support.engine_models import Driver, random_tokens

LENGTH = 200
CHUNKS = (64, 31)  # of the sequences that cache their prefix, in turn
MODELS = [("target", "float32"), ("target", "bfloat16"), ("llama", "float32"), ("gpt2", "bfloat16"), ("odd", "float32")]


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: "-".join(model))
def driver(request: pytest.FixtureRequest, driver_of: Callable[..., Driver]) -> Driver:
    torch.set_num_threads(1)
    return driver_of(*request.param)


def run(driver: Driver, table: BlockTable, token_ids: list[int], chunk_size: int) -> torch.Tensor:
    """Logits of all rows from the table's length on, in chunks: [rows, vocab] float32."""
    starts = range(table.length, len(token_ids), chunk_size)
    return torch.cat([driver.feed(table, token_ids[start : start + chunk_size]) for start in starts])


def test_rows_after_a_matched_prefix_are_the_same_bits(driver: Driver) -> None:
    """Claim: a text whose beginning another sequence cached, fed in any chunks, gives the logits of one fed from
    nothing: after one matched block, after many, with the last token alone fed again, and after a preemption, with its
    own cached blocks.

    Source: "numbers that do not depend on neighbours ... after prefix reuse", and after preemption. Conclusive: every
    row from the matched length on is compared with torch.equal, and the matched length is the expected one, so the
    rows did use the cached blocks.
    """
    cache, size = driver.cache, driver.cache.block_size
    text = random_tokens(LENGTH, 5, driver.model.description.vocabulary_size)
    alone = cache.open(LENGTH)
    reference = run(driver, alone, text, 64)
    cache.release(alone)
    for salt, chunk_size in zip("ab", CHUNKS):
        first = cache.open(LENGTH, salt)
        run(driver, first, text, chunk_size)
        cache.cache_prefix(first, text, LENGTH)
        for length in (size, 5 * size, LENGTH - LENGTH % size):
            beside = cache.open(LENGTH, salt)
            assert cache.match_prefix(beside, text[:length]) == length
            assert torch.equal(run(driver, beside, text, 50), reference[length:]), f"{length} tokens were found"
            cache.truncate(beside, length - 1)
            assert torch.equal(driver.feed(beside, text[length - 1 : length]), reference[length - 1 : length])
            cache.release(beside)
        cache.free(first)
        assert cache.match_prefix(first, text) == LENGTH - LENGTH % size
        cache.truncate(first, 3 * size + 1)
        assert torch.equal(run(driver, first, text, 64), reference[3 * size + 1 :]), "it was preempted"
        cache.release(first)
    cache.check_integrity()


def test_a_preempted_sequence_fed_again_beside_others_is_the_same(driver: Driver) -> None:
    """Claim: a sequence that lost all its blocks and is fed again from its tokens, in other blocks, beside others and
    in other chunks, goes on with the same bits.

    Source: design section 1, preemption and crash are "open it again". Conclusive: another sequence holds its old
    blocks when it is fed again, so none of their content is left.
    """
    cache = driver.cache
    text = random_tokens(LENGTH, 6, driver.model.description.vocabulary_size)
    preempted, other = cache.open(LENGTH), cache.open(LENGTH)
    reference = run(driver, preempted, text, 64)
    old = list(preempted.block_ids)
    cache.free(preempted)
    driver.feed(other, random_tokens(LENGTH - 10, 7, driver.model.description.vocabulary_size), 1)
    assert set(other.block_ids) & set(old)
    rows = []
    while preempted.length < LENGTH:
        piece = text[preempted.length : preempted.length + 23]
        rows.append(driver.step([(other, [1], 0), (preempted, piece, len(piece))]).logits)
    assert torch.equal(torch.cat(rows), reference)
    for table in (preempted, other):
        cache.release(table)
    cache.check_integrity()
