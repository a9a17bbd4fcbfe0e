"""A row of an encoder-decoder model has the same bits at every width and chunking, beside any neighbours, on any path
of a tree, after reuse of a prefix and after a preemption; with kernels and without.

As in `test_row_independence.py` every test compares with torch.equal against one reference: input and output fed once,
whole, alone. Sums in another order differ in the last bits of some of hundreds of logits a row with near certainty.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from specdec.engine.cache.kv_cache import BlockTable
from specdec.engine.interface import Chunk, RaggedBatch, StepAbandoned, StepFlag, tree_paths
from tests.support.encoder_decoder_models import START
from tests.support.engine_models import Driver, random_tokens

# Kind, type, threads, with kernels; input and output lengths.
MODELS = [("t5", "float32", 1, True), ("t5-gated", "bfloat16", 1, True), ("t5-gated-tied", "float32", 2, True)]
MODELS += [("t5", "float32", 1, False), ("t5-gated", "bfloat16", 2, False)]
INPUT_LENGTH, OUTPUT_LENGTH, FEW = 57, 90, 30
STARTS = (80, 64, 39, 23, 22, 7, 6, 1, 0)  # of the output: cells on both sides of block borders
PARENTS = (0, 1, 1, 0, 2, 5, 4)  # of a tree


class Case:
    """A model, an input, an output, and the reference logits of every token of it."""

    def __init__(self, driver: Driver, has_kernels: bool):
        self.driver = driver
        self.thread_count = torch.get_num_threads()
        self.input = random_tokens(INPUT_LENGTH, 5)
        self.output = [START, *random_tokens((OUTPUT_LENGTH if has_kernels else FEW) - 1, 6)]
        self.starts = [start for start in STARTS if start + 8 <= len(self.output)]
        table = self.open()
        self.reference = driver.feed(table, self.input + self.output, len(self.output))
        driver.cache.release(table)

    @property
    def tokens(self) -> list[int]:
        return self.input + self.output

    def open(self) -> BlockTable:
        return self.driver.open(INPUT_LENGTH + len(self.output) + 16, self.input)

    def check(self, logits: torch.Tensor, start: int) -> None:
        assert torch.equal(logits, self.reference[start : start + len(logits)]), f"rows from {start} on differ"


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: "-".join(map(str, model)))
def shared_case(request: pytest.FixtureRequest, driver_of: Callable[..., Driver]) -> Case:
    kind, dtype, threads, with_kernels = request.param
    torch.set_num_threads(threads)
    return Case(driver_of(kind, dtype, with_kernels), with_kernels)


@pytest.fixture
def case(shared_case: Case) -> Case:
    torch.set_num_threads(shared_case.thread_count)
    return shared_case


def test_logits_do_not_depend_on_how_an_output_is_fed(case: Case) -> None:
    """Claim: whether the input runs alone or with a part of the output, chunks, widths, and rollbacks over wrong drafts
    change no bit.

    Conclusive: widths 1, 2, 5, 8 are the steps of decoding and verifying, on both sides of block borders, and every
    draft is wrong before it is rolled back.
    """
    driver, output = case.driver, case.output
    for with_input, chunk_size in ((0, 7), (1, 64), (5, 1), (len(output), 1)):
        table = case.open()
        rows = [driver.feed(table, case.input + output[:with_input], with_input)]
        for start in range(with_input, len(output), chunk_size):
            rows.append(driver.feed(table, output[start : start + chunk_size]))
        case.check(torch.cat(rows), 0)
        driver.cache.release(table)
    table = case.open()
    driver.feed(table, case.tokens, 1)
    wrong = random_tokens(8, 9)
    for start in case.starts:
        driver.cache.truncate(table, INPUT_LENGTH + start)
        for width in (1, 2, 5, 8):
            driver.feed(table, wrong[:width])
            driver.cache.truncate(table, INPUT_LENGTH + start)
            case.check(driver.feed(table, output[start : start + width]), start)
            driver.cache.truncate(table, INPUT_LENGTH + start)
    driver.cache.release(table)


def test_logits_do_not_depend_on_neighbours(case: Case) -> None:
    """Claim: beside encoders of other inputs, their decoders, and others of the same input, in any order, rows of both
    stacks have the same bits.

    Conclusive: the inputs beside it have 1 to 130 tokens and run in the same step as its own, and as its decodes.
    """
    driver, output, count = case.driver, case.output, len(case.output)
    others = [random_tokens(length, length) for length in (130, 1, 16, 40)]
    for own_index in (0, 2, 4):
        tables = [driver.open(len(one) + 20, one) for one in others]
        feeds = [(table, [*one, START, 5, 6], 2) for table, one in zip(tables, others)]
        own, decoding = case.open(), case.open()
        driver.feed(decoding, case.input + output[: count - 5], 1)
        feeds.insert(own_index, (own, case.input + output[:9], 9))
        feeds.append((decoding, output[count - 5 :], 5))
        rows = driver.step(feeds).logits.split([wanted for _, _, wanted in feeds])
        case.check(rows[own_index], 0)
        case.check(rows[-1], count - 5)
        feeds = [(table, [7] * 3, 1) for table in tables]
        feeds.insert(own_index, (own, output[9:15], 6))
        case.check(driver.step(feeds).logits.split([wanted for _, _, wanted in feeds])[own_index], 9)
        for table in (*tables, own, decoding):
            driver.cache.release(table)
    driver.cache.check_integrity()


def test_nodes_have_the_bits_of_their_paths_as_chains(case: Case) -> None:
    """Claim: a node of a tree, in any cell behind its output, has the logits of its path fed as a chain, and accepted
    rows that are moved to their positions serve as such.

    Conclusive: every node of a tree in the cells of a verification, and of one whose cells are drawn at random.
    """
    driver, output = case.driver, case.output[:20]
    base = INPUT_LENGTH + len(output)
    tokens = random_tokens(len(PARENTS), 8)
    table = case.open()
    driver.feed(table, case.input + output, 1)
    driver.cache.prepare_write(table, base + 10)
    expected = {}
    for is_scattered in (False, True):
        paths = tree_paths(PARENTS, base)
        cells = random.Random(3).sample(range(base, base + 10), len(PARENTS))
        if is_scattered:
            paths = [[cells[cell - base] for cell in path] for path in paths]
        chunk = Chunk(table.block_ids, base, tokens, len(tokens), paths, INPUT_LENGTH)
        found = driver.model.forward(RaggedBatch((chunk,))).logits
        for node, path in enumerate(tree_paths(PARENTS, 0)):
            text = [tokens[cell] for cell in path]
            if node not in expected:
                chain = case.open()
                driver.feed(chain, case.input, 0)
                expected[node] = driver.feed(chain, output + text, 1)[0]
                driver.cache.release(chain)
            assert torch.equal(found[node], expected[node]), (is_scattered, node)
    path = tree_paths(PARENTS, 0)[5]
    driver.cache.move(table, [cells[cell] for cell in path], range(base, base + len(path)))
    driver.cache.advance(table, base + len(path))
    again = driver.feed(table, [9], 1)
    driver.cache.truncate(table, base)
    assert torch.equal(driver.feed(table, [*(tokens[cell] for cell in path), 9], 1), again)
    driver.cache.release(table)


def test_a_preempted_sequence_fed_again_is_the_same(case: Case) -> None:
    """Claim: a sequence that lost its blocks runs its input and output again, in other blocks, beside another, and goes
    on with the same bits.

    Conclusive: another sequence holds its old blocks meanwhile, so none of their content is left.
    """
    driver, other_input = case.driver, random_tokens(90, 7)
    table = driver.cache.open(len(case.tokens), encoder_input=case.input)
    other = driver.cache.open(120, encoder_input=other_input)
    driver.feed(table, case.tokens, 1)
    old = list(table.block_ids)
    driver.cache.free(table)
    assert table.length == 0 and table.encoder_length == INPUT_LENGTH
    driver.feed(other, [*other_input, START], 1)
    assert set(other.block_ids) & set(old)
    rows = []
    end = 10
    driver.step([(other, [1], 0), (table, case.input + case.output[:end], end)])
    while end < len(case.output):
        piece = case.output[end : end + 23]
        rows.append(driver.step([(other, [1], 0), (table, piece, len(piece))]).logits)
        end += len(piece)
    case.check(torch.cat(rows), 10)
    for each in (table, other):
        driver.cache.release(each)


def test_the_same_input_is_reused_and_no_other(case: Case) -> None:
    """Claim: a sequence of the same input begins with the cached blocks, and its rows have the same bits; one whose
    input differs in its last token, or is a part of it, or with another salt, or a part of a cached input, matches
    nothing, though its first blocks hold the same tokens.

    Conclusive: the matched length is the expected one, so the rows did use the cached blocks.
    """
    cache, size, tokens = case.driver.cache, case.driver.cache.block_size, case.tokens
    first = cache.open(len(tokens), "a", case.input)
    case.driver.feed(first, tokens, 1)
    cache.cache_prefix(first, tokens, len(tokens))
    whole = len(tokens) - len(tokens) % size
    behind_input = -(-INPUT_LENGTH // size) * size
    for length in (behind_input, whole):
        beside = cache.open(len(tokens), "a", case.input)
        assert cache.match_prefix(beside, tokens[:length]) == length
        case.check(rows_behind(case, beside, length), length - INPUT_LENGTH)
        cache.truncate(beside, length - 1)
        case.check(case.driver.feed(beside, tokens[length - 1 : length]), length - 1 - INPUT_LENGTH)
        cache.release(beside)
    changed = [*case.input[:-1], case.input[-1] % 287 + 1]
    for salt, own_input in (("a", changed), ("a", case.input[: 2 * size]), ("b", case.input), ("a", [])):
        other = cache.open(len(tokens), salt, own_input)
        assert cache.match_prefix(other, [*own_input, *tokens[len(own_input) :]]) == 0
        cache.release(other)
    part = cache.open(len(tokens), "a", case.input)
    assert cache.match_prefix(part, tokens[: INPUT_LENGTH - 1]) == 0 and not part.block_ids
    assert cache.match_prefix(part, tokens) == whole
    cache.truncate(part, INPUT_LENGTH - 1)
    assert part.length == 0 and part.digests == []
    for table in (part, first):
        cache.release(table)
    other_output = cache.open(len(tokens), "a", case.input)
    assert cache.match_prefix(other_output, [*case.input, START, 1, 2]) == INPUT_LENGTH, "no block of the output"
    case.check(rows_behind(case, other_output, INPUT_LENGTH), 0)
    cache.release(other_output)
    cache.check_integrity()


def rows_behind(case: Case, table: BlockTable, length: int) -> torch.Tensor:
    """The logits of all tokens from `length` on."""
    rest = case.tokens[length:]
    return case.driver.feed(table, rest) if rest else case.reference[:0]


def test_an_abandoned_step_runs_again_with_the_same_bits(case: Case) -> None:
    """Claim: a step that is abandoned before any of its layers, of either stack, raises StepAbandoned, and the next one
    gives every row its bits.

    Conclusive: the flag is asked once in each layer; it is set at the first, at one of each stack, and at the last.
    """
    driver = case.driver
    table = case.open()
    driver.cache.prepare_write(table, len(case.tokens))
    chunk = Chunk(table.block_ids, 0, case.tokens, len(case.output), (), INPUT_LENGTH)
    for left in (0, 2, 3, 4):
        asked = iter([False] * left + [True])
        with pytest.raises(StepAbandoned):
            driver.model.forward(RaggedBatch((chunk,), lambda asked=asked: next(asked)))
    assert next(asked, None) is None
    case.check(driver.model.forward(RaggedBatch((chunk,), StepFlag())).logits, 0)
    driver.cache.release(table)


def test_what_a_row_does_not_see_changes_no_bit(case: Case) -> None:
    """Claim: not-a-number in another sequence's input fails that sequence only, and cells behind a row's own are not
    read.

    Conclusive: a product with not-a-number, even by zero, would be none.
    """
    driver, table = case.driver, case.open()
    driver.feed(table, case.input + case.output[:10], 1)
    driver.cache.prepare_write(table, table.length + 20)
    storage = driver.model.backend._storage
    spare = driver.open(64, random_tokens(30, 1))
    for cell in range(table.length + 1, table.length + 20):
        block, offset = table.block_ids[cell // 16], cell % 16
        for keys, values in zip(storage.keys, storage.values):
            keys[block, :, :, offset] = values[block, :, offset] = float("nan")
    embedding = driver.model._base.encoder.embedding
    kept, own = embedding.weight, embedding.weight.detach().clone()  # the decoder has the same one
    own[1] = float("nan")
    embedding.weight = torch.nn.Parameter(own, requires_grad=False)
    try:
        chunks = (
            Chunk(spare.block_ids, 0, [*random_tokens(29, 1), 1, START], 1, (), 30),
            Chunk(table.block_ids, table.length, case.output[10:11], 1, (), INPUT_LENGTH),
        )
        output = driver.model.forward(RaggedBatch(chunks))
    finally:
        embedding.weight = kept
    assert list(output.is_finite) == [False, True]
    case.check(output.logits[1:], 10)
    for each in (table, spare):
        driver.cache.scrub(each, each.length, each.length + 20)
        driver.cache.release(each)
