"""A row's logits do not depend on verify width, neighbours, prefill chunks, rollback, re-feeding, blocks or copies.

Design section 7 promises it bit for bit, and exactness on = off rests on it. Every test compares with torch.equal
against one reference: the same tokens fed once, in chunks of 64, alone; with native kernels and without. Random sums in
another order differ in the last bits of some of 4096 (or 288) logits with near certainty, so equality over hundreds of
rows is no accident.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.engine_models import Driver, random_tokens
from tests.support.packed import KINDS

STARTS = (190, 128, 127, 112, 63, 17, 16, 15, 1, 0)  # on both sides of block borders
LENGTH, FEW = 200, 40  # of a text: with kernels, without
NAMES = ("target", "draft", "llama", "qwen2", "gpt2", "odd")
MODELS = [(name, dtype, 1, True) for name in NAMES for dtype in ("float32", "bfloat16")]
# Windows of 40, some of 150, capped scores and logits, norms of heads; modules that stay `transformers`' own.
MODELS += [(name, dtype, 1, True) for name in ("gemma2", "gemma3-wide") for dtype in ("float32", "float16")]
MODELS += [(name, "float32", 1, True) for name in ("qwen3", "phi3", "cohere", "olmo2", "gpt_neox")]
MODELS += [("llama", "float16", 1, True), ("gemma2", "bfloat16", 1, True), ("gpt_neox", "bfloat16", 1, True)]
MODELS += [("target", "float32", 2, True), ("target", "bfloat16", 2, True), ("gpt2", "float32", 2, True)]
# Without kernels rows are computed one at a time.
MODELS += [(name, dtype, 1, False) for name in ("llama", "gemma2") for dtype in ("float32", "bfloat16")]
MODELS += [("gpt2", "float16", 1, False), ("cohere", "float32", 2, False)]
# Packed weights, in one call and module by module.
MODELS += [
    (f"{name}-{kind}", dtype, 1, True)
    for name in ("llama", "gpt_neox")
    for kind in KINDS
    for dtype in ("float32", "bfloat16")
]
MODELS += [("llama-int4", "float32", 1, False)]
# Of each kind, type and number of threads one; the others run with the longer tests.
USUAL = {
    ("target", "float32", 1, True),
    ("target", "bfloat16", 2, True),
    ("draft", "bfloat16", 1, True),
    ("odd", "float32", 1, True),
    ("gpt2", "float32", 2, True),
    ("gemma2", "float16", 1, True),
    ("gemma3-wide", "float32", 1, True),
    ("gpt_neox", "bfloat16", 1, True),
    ("llama-int4", "bfloat16", 1, True),
    ("llama-int8", "float32", 1, True),
    ("gpt_neox-float8", "bfloat16", 1, True),
    ("llama", "bfloat16", 1, False),
    ("cohere", "float32", 2, False),
}
CASES = [pytest.param(own, id="-".join(map(str, own)), marks=[pytest.mark.more] * (own not in USUAL)) for own in MODELS]


class Case:
    """A model, a text, and the reference logits of every position of it."""

    def __init__(self, driver: Driver, length: int):
        self.driver = driver
        self.length = length
        self.thread_count = torch.get_num_threads()
        self.vocabulary_size = driver.model.description.vocabulary_size
        self.token_ids = random_tokens(length, 5, self.vocabulary_size)
        self.starts = [start for start in STARTS if start + 8 <= length]
        self.reference = self.run(64)  # [length, vocab] float32

    def run(self, chunk_size: int) -> torch.Tensor:
        table = self.driver.open(self.length)
        starts = range(0, self.length, chunk_size)
        rows = [self.driver.feed(table, self.token_ids[start : start + chunk_size]) for start in starts]
        self.driver.cache.release(table)
        return torch.cat(rows)

    def check(self, logits: torch.Tensor, start: int) -> None:
        assert torch.equal(logits, self.reference[start : start + len(logits)]), f"rows from {start} on differ"


@pytest.fixture(scope="module", params=CASES)
def shared_case(request: pytest.FixtureRequest, driver_of: Callable[..., Driver]) -> Case:
    name, dtype, threads, with_kernels = request.param
    torch.set_num_threads(threads)
    return Case(driver_of(name, dtype, with_kernels), LENGTH if with_kernels else FEW)


@pytest.fixture
def case(shared_case: Case) -> Case:
    torch.set_num_threads(shared_case.thread_count)
    return shared_case


def test_logits_do_not_depend_on_how_a_text_is_fed(case: Case) -> None:
    """Claim: verify width, position, prefill chunks, rollback over wrong drafts and re-feeding change no bit.

    Source: design section 7. Conclusive: widths 1, 2, 5, 8 are the steps of decoding and verifying; positions lie at
    the start, and on both sides of block borders, and every draft is wrong before it is rolled back.
    """
    driver, token_ids = case.driver, case.token_ids
    for chunk_size in (7, case.length):
        case.check(case.run(chunk_size), 0)
    table = driver.open(case.length)
    driver.feed(table, token_ids, 1)
    wrong = random_tokens(8, 9, case.vocabulary_size)
    for start in case.starts:
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

    Source: design section 7. Conclusive: the neighbours' texts are from one token to more than twice the length, and
    all rows of a step run through each product together.
    """
    driver, token_ids = case.driver, case.token_ids
    starts = [start for start in (0, 30, 190, 5, 128, 100, 64, 150) if start + 6 <= case.length]
    long = 490 if case.length == LENGTH else 60
    longest = driver.open(500)
    driver.feed(longest, random_tokens(long, 13, case.vocabulary_size), 1)
    for count in (1, 3, 8):
        tables = [driver.open(case.length) for _ in starts[:count]]
        for table, start in zip(tables, starts):
            if start:
                driver.feed(table, token_ids[:start], 1)
        feeds = [
            (table, token_ids[start : start + 1 + index % 6], 1 + index % 6)
            for index, (table, start) in enumerate(zip(tables, starts))
        ]
        first = min(70, case.length)
        feeds[0] = (tables[0], token_ids[:first], first)
        feeds.append((longest, [1, 2, 3], 0))
        row = 0
        logits = driver.step(feeds).logits
        driver.cache.truncate(longest, long)
        for (_, fed, _), start in zip(feeds[:count], starts):
            case.check(logits[row : row + len(fed)], start)
            row += len(fed)
        for table in tables:
            driver.cache.release(table)
    driver.cache.release(longest)
    driver.cache.check_integrity()


@pytest.mark.parametrize("name, dtype", [("llama-long", "float32"), ("gemma2-long", "bfloat16")])
def test_rows_around_the_borders_of_splits_have_their_bits(name: str, dtype: str, driver_of: Callable[..., Driver]):
    """Claim: far into a text, sums over the past are added in the same order beside a longer text as alone, whatever
    the number of threads.

    Source: attention rescales its sums at multiples of 512 positions. Conclusive: rows on both sides of the first two
    borders, alone, among five, beside another text, in one long chunk, and on one to three threads; layers with a
    window of 40, whose first key lies on either side of a border, among them.
    """
    driver = driver_of(name, dtype)
    token_ids = random_tokens(1050, 14)
    table, longest = driver.open(1050), driver.open(1100)
    driver.feed(longest, random_tokens(1090, 13), 1)
    whole = driver.feed(table, token_ids)
    for start in (1040, 1024, 1023, 1020, 560, 550, 513, 512, 511, 510, 300):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            driver.cache.truncate(table, start)
            alone = torch.cat([driver.feed(table, [token]) for token in token_ids[start : start + 5]])
            driver.cache.truncate(table, start)
            beside = driver.step([(table, token_ids[start : start + 5], 5), (longest, [1, 2, 3], 0)]).logits
            assert torch.equal(alone, beside)
            assert torch.equal(alone, whole[start : start + 5])
            driver.cache.truncate(longest, 1090)
    driver.cache.release(table)
    driver.cache.release(longest)


def test_logits_do_not_depend_on_blocks_or_copies(case: Case) -> None:
    """Claim: other blocks, stale content in them, and blocks that are shared and copied on write change no bit.

    Source: design section 6, sequences share cached blocks. Conclusive: the second table holds other blocks than the
    first, which were written by another text; both sharers go on with different tokens from a shared half block.
    """
    driver, token_ids, length = case.driver, case.token_ids, case.length
    cached = 3 * length // 4
    matched = cached // 16 * 16
    back = matched - 7
    stale = driver.open(length)
    driver.feed(stale, random_tokens(length, 11, case.vocabulary_size), 1)
    held = driver.open(length // 5)
    driver.cache.release(stale)
    other = driver.open(length)
    case.check(driver.feed(other, token_ids[:cached]), 0)
    driver.cache.cache_prefix(other, token_ids, cached)
    sharer = driver.cache.open(length)
    assert driver.cache.match_prefix(sharer, token_ids[:cached]) == matched
    driver.cache.truncate(sharer, back)
    driver.feed(sharer, random_tokens(9, 12, case.vocabulary_size), 1)
    case.check(driver.feed(other, token_ids[cached : cached + 10]), cached)
    driver.cache.truncate(sharer, back)
    case.check(driver.feed(sharer, token_ids[back : back + 8]), back)
    driver.cache.release(other)
    case.check(driver.feed(sharer, token_ids[back + 8 : cached]), back + 8)
    for table in (sharer, held):
        driver.cache.release(table)
    driver.cache.check_integrity()
