"""A row's logits do not depend on verify width, neighbours, prefill chunks, rollback, re-feeding, blocks or copies.

Design section 7 promises it bit for bit, and exactness on = off rests on it. Every test compares with torch.equal
against one reference: the same tokens fed once, in chunks of 64, alone. Random sums in another order differ in the
last bits of some of 4096 (or 288) logits with near certainty, so equality over hundreds of rows is no accident.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.engine_models import Driver, random_tokens

STARTS = (190, 128, 127, 112, 63, 17, 16, 15, 1, 0)  # on both sides of block and split borders
LENGTH = 200  # beyond three key splits of 64 and many blocks of 16
NAMES = ("target", "draft", "llama", "qwen2", "gpt2", "odd")
MODELS = [(name, dtype, 1) for name in NAMES for dtype in ("float32", "bfloat16")]
# Windows of 40, some of 150, capped scores and logits, norms of heads; modules that stay `transformers`' own.
MODELS += [(name, dtype, 1) for name in ("gemma2", "gemma3-wide") for dtype in ("float32", "float16")]
MODELS += [(name, "float32", 1) for name in ("qwen3", "phi3", "cohere", "olmo2", "gpt_neox")]
MODELS += [("llama", "float16", 1), ("gemma2", "bfloat16", 1), ("gpt_neox", "bfloat16", 1)]
# With two threads the library divides products otherwise: measured to make widths 5 to 11 differ that agree with one.
MODELS += [("target", "float32", 2), ("target", "bfloat16", 2), ("gpt2", "float32", 2), ("odd", "float32", 2)]


class Case:
    """A model, a text, and the reference logits of every position of it."""

    def __init__(self, driver: Driver):
        self.driver = driver
        self.thread_count = torch.get_num_threads()
        self.vocabulary_size = driver.model.description.vocabulary_size
        self.token_ids = random_tokens(LENGTH, 5, self.vocabulary_size)
        self.reference = self.run(64)  # [LENGTH, vocab] float32

    def run(self, chunk_size: int) -> torch.Tensor:
        table = self.driver.open(LENGTH)
        starts = range(0, LENGTH, chunk_size)
        rows = [self.driver.feed(table, self.token_ids[start : start + chunk_size]) for start in starts]
        self.driver.cache.release(table)
        return torch.cat(rows)

    def check(self, logits: torch.Tensor, start: int) -> None:
        assert torch.equal(logits, self.reference[start : start + len(logits)]), f"rows from {start} on differ"


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: "-".join(map(str, model)))
def shared_case(request: pytest.FixtureRequest, driver_of: Callable[..., Driver]) -> Case:
    name, dtype, threads = request.param
    torch.set_num_threads(threads)
    return Case(driver_of(name, dtype))


@pytest.fixture
def case(shared_case: Case) -> Case:
    torch.set_num_threads(shared_case.thread_count)
    return shared_case


def test_logits_do_not_depend_on_how_a_text_is_fed(case: Case) -> None:
    """Claim: verify width, position, prefill chunks, rollback over wrong drafts and re-feeding change no bit.

    Source: design section 7. Conclusive: widths 1, 2, 5, 8 are the steps of decoding and verifying; positions lie at
    the start, on both sides of block and key split borders, and every draft is wrong before it is rolled back.
    """
    driver, token_ids = case.driver, case.token_ids
    for chunk_size in (7, LENGTH):
        case.check(case.run(chunk_size), 0)
    table = driver.open(LENGTH)
    driver.feed(table, token_ids, 1)
    wrong = random_tokens(8, 9, case.vocabulary_size)
    for start in STARTS[:: case.thread_count]:  # two threads on a busy machine are slow: every other position
        driver.cache.truncate(table, start)
        for width in (1, 2, 5, 8):
            driver.feed(table, wrong[:width])
            driver.cache.truncate(table, start)
            case.check(driver.feed(table, token_ids[start : start + width]), start)
            driver.cache.truncate(table, start)
    driver.cache.truncate(table, 0)
    for position in range(20):
        case.check(driver.feed(table, token_ids[position : position + 1]), position)
    driver.cache.release(table)


def test_logits_do_not_depend_on_neighbours(case: Case) -> None:
    """Claim: among 1, 3 or 8 sequences of different lengths, in any order, mixed with prefill, a row is the same bits.

    Source: design section 7. Conclusive: the neighbours' texts are from one token to more than twice the length, so
    padding to the longest by whole key splits, grouping and tiling all take part.
    """
    driver, token_ids = case.driver, case.token_ids
    starts = (0, 190, 30, 5, 128, 100, 64, 150)
    longest = driver.open(500)
    driver.feed(longest, random_tokens(490, 13, case.vocabulary_size), 1)
    for count in (1, 3, 8):
        tables = [driver.open(LENGTH) for _ in range(count)]
        for table, start in zip(tables, starts):
            if start:
                driver.feed(table, token_ids[:start], 1)
        feeds = [
            (table, token_ids[start : start + 1 + index % 6], 1 + index % 6)
            for index, (table, start) in enumerate(zip(tables, starts))
        ]
        feeds[0] = (tables[0], token_ids[:70], 70)
        feeds.append((longest, [1, 2, 3], 0))
        row = 0
        logits = driver.step(feeds).logits
        driver.cache.truncate(longest, 490)
        for (_, fed, _), start in zip(feeds[:count], starts):
            case.check(logits[row : row + len(fed)], start)
            row += len(fed)
        for table in tables:
            driver.cache.release(table)
    driver.cache.release(longest)
    driver.cache.check_integrity()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3-wide"])
def test_attention_sums_do_not_depend_on_a_longer_neighbour(name: str, driver_of: Callable[..., Driver]) -> None:
    """Claim: far into a text, sums over the past are added in the same order beside a longer text as alone.

    Source: measured, a product over 256 positions adds 200 values and zeros in another order than one over 512.
    Conclusive: texts of 2 to 4 key splits beside one of 4, computed in one group, where such a product differs; and the
    same rows within one long chunk, whose tiles start in an earlier split where layers have a window of 40 or 150.
    """
    driver = driver_of(name)
    token_ids = random_tokens(410, 14)
    table, longest = driver.open(410), driver.open(500)
    driver.feed(longest, random_tokens(490, 13), 1)
    whole = driver.feed(table, token_ids)
    for start in (405, 380, 330, 300, 270, 250, 215):
        driver.cache.truncate(table, start)
        alone = driver.feed(table, token_ids[start : start + 5])
        driver.cache.truncate(table, start)
        beside = driver.step([(table, token_ids[start : start + 5], 5), (longest, [1, 2, 3], 0)]).logits
        assert torch.equal(alone, beside)
        assert torch.equal(alone, whole[start : start + 5])
        driver.cache.truncate(longest, 490)
    driver.cache.release(table)
    driver.cache.release(longest)


def test_logits_do_not_depend_on_blocks_or_copies(case: Case) -> None:
    """Claim: other blocks, stale content in them, and blocks that are shared and copied on write change no bit.

    Source: design section 6, sequences share cached blocks. Conclusive: the second table holds other blocks than the
    first, which were written by another text; both sharers go on with different tokens from a shared half block.
    """
    driver, token_ids = case.driver, case.token_ids
    stale = driver.open(LENGTH)
    driver.feed(stale, random_tokens(LENGTH, 11, case.vocabulary_size), 1)
    held = driver.open(40)
    driver.cache.release(stale)
    other = driver.open(LENGTH)
    case.check(driver.feed(other, token_ids[:150]), 0)
    driver.cache.cache_prefix(other, token_ids, 150)
    sharer = driver.cache.open(LENGTH)
    assert driver.cache.match_prefix(sharer, token_ids[:150]) == 144
    driver.cache.truncate(sharer, 137)
    driver.feed(sharer, random_tokens(9, 12, case.vocabulary_size), 1)
    case.check(driver.feed(other, token_ids[150:160]), 150)
    driver.cache.truncate(sharer, 137)
    case.check(driver.feed(sharer, token_ids[137:145]), 137)
    driver.cache.release(other)
    case.check(driver.feed(sharer, token_ids[145:150]), 145)
    for table in (sharer, held):
        driver.cache.release(table)
    driver.cache.check_integrity()
