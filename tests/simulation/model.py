"""Table models in pure Python: the next token's weights depend on the last two tokens.

They restate what `specdec.decoding` does with logits, in integer arithmetic over a handful of tokens: they are the
models of the simulation, not a check of that package (tests/law is). Logits are replaced by what the cache holds: the
tokens are written to paged storage and read back through the block table, so an error in rollback, forking or block
ownership changes what is computed, and is noticed besides, since every row's tokens are compared with its path.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from specdec.decoding.evidence import EvidenceRequest
from specdec.decoding.proposal import Proposal, ProposalRequest
from specdec.engine.interface import RaggedBatch, Segment, StepOutput
from specdec.protocol.noise import UNIFORM_BITS, Lane, hash64, uniform_bits
from specdec.protocol.types import Description, Evidence, Law, Row, Rule
from tests.simulation.clock import Clock, Violation
from tests.support.plain_noise import gumbel

VOCABULARY_SIZE = 6
BEFORE = VOCABULARY_SIZE  # the token before the text
AGREEMENT = 0.7  # share of contexts in which the draft's weights resemble the target's
TOKEN_IDS = tuple(range(VOCABULARY_SIZE))
NO_NOISE = (0.0,) * VOCABULARY_SIZE


def describe(positions_max: int) -> Description:
    """What a replica with a table model says of itself."""
    return Description("table", "table", "table", VOCABULARY_SIZE, positions_max, (), "integer", "cpu", "")


@cache
def likeliest_after(table: int) -> dict[tuple[int, int], int]:
    """The target's likeliest token after each two: along a circuit through all pairs, so that texts do not repeat."""
    rng = random.Random(table)
    edges = {token: rng.sample(TOKEN_IDS, VOCABULARY_SIZE) for token in TOKEN_IDS}
    circuit, stack = [], [0]
    while stack:  # Hierholzer: every edge once
        following = edges[stack[-1]]
        if following:
            stack.append(following.pop())
        else:
            circuit.append(stack.pop())
    return {pair: after for pair, after in zip(zip(circuit, circuit[1:]), [*circuit[2:], circuit[1]])}


@cache
def weights_after(table: int, is_draft: bool, before: int, last: int) -> tuple[int, ...]:
    """The weights of the next token; drafts agree with their target in most contexts."""
    context = before * (VOCABULARY_SIZE + 1) + last
    strays = is_draft and hash64(table, Lane.DRAFT, context, 99) % 1000 >= 1000 * AGREEMENT
    source = table + 1000 * strays
    weights = [7 * is_draft + 1 + (hash64(source, Lane.NEXT, context, token) % 14) ** 2 for token in TOKEN_IDS]
    if not strays:
        weights[likeliest_after(table).get((before, last), 0)] += 700
    return tuple(weights)


def weights_of(table: int, is_draft: bool, tokens: Sequence[int]) -> tuple[int, ...]:
    """The weights of the token after `tokens`, of which there is at least one."""
    return weights_after(table, is_draft, tokens[-2] if len(tokens) > 1 else BEFORE, tokens[-1])


@lru_cache(maxsize=1 << 16)
def noise_at(seed: int, position: int) -> tuple[float, ...]:
    """The Gumbel noise of every token at a position."""
    return tuple(gumbel(seed, position, token) for token in TOKEN_IDS)


@lru_cache(maxsize=1 << 16)
def _ranked(weights: tuple[int, ...], noise: tuple[float, ...]) -> tuple[int, ...]:
    scores = [math.log(weight) + nudge for weight, nudge in zip(weights, noise)]
    return tuple(sorted(TOKEN_IDS, key=lambda token: (-scores[token], token)))


def ranked(law: Law, weights: tuple[int, ...], position: int) -> tuple[int, ...]:
    """Token ids, best first, by weight (GREEDY and the guesses of REJECTION) or by perturbed score (COUPLED)."""
    return _ranked(weights, noise_at(law.seed, position) if law.rule is Rule.COUPLED else NO_NOISE)


@cache
def row_of(weights: tuple[int, ...]) -> Row:
    """The row that holds all tokens with their weights."""
    return Row(TOKEN_IDS, weights)


def drawn(masses: Sequence[int], bits: int) -> int:
    """The index that a 53-bit integer picks out of integer masses."""
    left = bits * sum(masses) >> UNIFORM_BITS
    for index, mass in enumerate(masses):
        left -= mass
        if left < 0:
            return index
    raise AssertionError("bits are below 2**53")


def residual(weights: Sequence[int], row: Row) -> list[int]:
    """Integer masses in proportion to max(0, target - draft); the target's own where that is nothing."""
    total, row_total = sum(weights), row.total
    draft = dict(zip(row.token_ids, row.weights))
    masses = [max(0, weight * row_total - draft.get(token, 0) * total) for token, weight in enumerate(weights)]
    return masses if any(masses) else list(weights)


def plain_text(table: int, law: Law, prompt: Sequence[int], length: int) -> list[int]:
    """Prompt and output of plain decoding, without any draft; GREEDY and COUPLED only."""
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(ranked(law, weights_of(table, False, tokens), len(tokens))[0])
    return tokens


def evidence_at(table: int, request: EvidenceRequest, paths: Sequence[Sequence[int]]) -> Evidence:
    """Evidence for a request whose position i comes after `paths[i]`."""
    law = request.law
    weights = [weights_of(table, False, path) for path in paths]
    base = len(request.committed)
    if law.rule is not Rule.REJECTION:
        return Evidence(tuple(ranked(law, line, base + index)[0] for index, line in enumerate(weights)))
    replacements = []
    for index, line in enumerate(weights):
        masses = residual(line, request.rows[index]) if index < len(request.rows) else line
        replacements.append(drawn(masses, uniform_bits(law.seed, Lane.NEXT, request.round_index, base + index)))
    probs = [line[token] / sum(line) for line, token in zip(weights, request.draft_token_ids)]
    return Evidence(tuple(replacements), tuple(probs))


def round_tokens(table: int, request: EvidenceRequest) -> list[int]:
    """What a round must commit: a function of its content, the seed and the round alone, computed independently."""
    tokens, law = list(request.committed), request.law
    for index, token in enumerate((*request.draft_token_ids, None)):
        weights = weights_of(table, False, tokens)
        bits = uniform_bits(law.seed, Lane.NEXT, request.round_index, len(tokens))
        if token is None:
            return [*tokens[len(request.committed) :], drawn(weights, bits)]
        row = request.rows[index]
        accept = uniform_bits(law.seed, Lane.ACCEPT, request.round_index, len(tokens))
        draft_weight = dict(zip(row.token_ids, row.weights))[token]
        if not accept * draft_weight * sum(weights) < weights[token] * row.total << UNIFORM_BITS:
            return [*tokens[len(request.committed) :], drawn(residual(weights, row), bits)]
        tokens.append(token)
    raise AssertionError("the last position ends the round")


class TokenStorage:
    """Token ids in blocks; the content of a block that nobody wrote is no token."""

    def __init__(self, block_count: int, block_size: int) -> None:
        self.block_size = block_size
        self.empty = [-1] * block_size
        self.cells = [self.empty] * block_count

    def copy_block(self, source: int, destination: int) -> None:
        self.cells[destination] = self.cells[source].copy()

    def scrub(self, block_id: int, start: int, end: int) -> None:
        self.cells[block_id] = self.cells[block_id].copy()
        self.cells[block_id][start:end] = self.empty[start:end]

    def write(self, block_ids: Sequence[int], places: Sequence[int], token_ids: Sequence[int]) -> None:
        """Puts tokens at these places of a sequence."""
        size, cells = self.block_size, self.cells
        for position, token in zip(places, token_ids):
            block_id = block_ids[position // size]
            if cells[block_id] is self.empty:
                cells[block_id] = self.empty.copy()
            cells[block_id][position % size] = token

    def read(self, block_ids: Sequence[int], end: int) -> list[int]:
        """The tokens at positions [0, end)."""
        tokens: list[int] = []
        for block_id in block_ids[: -(-end // self.block_size)]:
            tokens += self.cells[block_id]
        return tokens[:end]


class CachedRows(list):
    """Stands where logits stand: for each row the tokens that the cache holds up to and including its own."""

    def split(self, counts: Sequence[int]) -> list[CachedRows]:
        """As `torch.Tensor.split`."""
        parts, start = [], 0
        for count in counts:
            parts.append(CachedRows(self[start : start + count]))
            start += count
        return parts

    @classmethod
    def __torch_function__(cls, function: Callable, _types: object, arguments: tuple, _named: object = None) -> Any:
        """`torch.cat` of such rows, which the engine uses where a part of a step failed."""
        assert function is torch.cat, f"the engine asks rows for {function}"
        return cls(row for part in arguments[0] for row in part)


@dataclass(slots=True)
class TableModel:
    """A CausalModel for the engine. `step_s(rows)` is how long a step takes; `last_rows` counts those of the last."""

    clock: Clock
    step_s: Callable[[int], float]
    storage: TokenStorage | None = None

    def allocate(self, block_count: int, block_size: int) -> TokenStorage:
        """The engine calls it once."""
        self.storage = TokenStorage(block_count, block_size)
        return self.storage

    def forward(self, batch: RaggedBatch) -> StepOutput:
        """Writes the batch's tokens, then reads every row's path back out of the cache."""
        storage = self.storage
        assert storage is not None
        for segment in batch.segments:
            places = segment.tree.cells if segment.tree else range(segment.start, segment.end)
            storage.write(segment.block_ids, places, segment.token_ids)
        rows = CachedRows()
        for segment in batch.segments:
            if segment.tree is not None:
                rows += self._seen(segment)
                continue
            tokens = storage.read(segment.block_ids, segment.end)
            rows += [tokens[: segment.end - offset] for offset in range(segment.logit_count - 1, -1, -1)]
        self.clock.in_step_s += self.step_s(batch.row_count)
        return StepOutput(rows, (True,) * len(batch.segments))

    def _seen(self, segment: Segment) -> list[list[int]]:
        """What each row of a tree with logits sees, in order of position; each must see one token at every position."""
        assert self.storage is not None and segment.tree is not None
        tokens = self.storage.read(segment.block_ids, segment.tree.visible.shape[1])
        found = []
        for row in range(len(segment.token_ids) - segment.logit_count, len(segment.token_ids)):
            cells = segment.tree.visible[row].nonzero()[0].tolist()
            ordered = sorted(cells, key=lambda cell: segment.tree.cell_positions[cell])
            positions = [int(segment.tree.cell_positions[cell]) for cell in ordered]
            if positions != list(range(segment.tree.positions[row] + 1)):
                raise Violation(f"a row at {segment.tree.positions[row]} sees the positions {positions}")
            found.append([tokens[cell] for cell in ordered])
        return found


def cached_paths(rows: CachedRows, wanted: Sequence[Sequence[int]]) -> CachedRows:
    """The rows, each seen to hold what is `wanted` of it. Raises Violation: the cache went wrong."""
    for row, path in zip(rows, wanted):
        if row != list(path):
            raise Violation(f"the cache holds {row}, the path evaluated is {list(path)}")
    return rows


def verification_paths(request: EvidenceRequest) -> list[list[int]]:
    """The path before each position of a verification."""
    tokens = [*request.committed, *request.draft_token_ids]
    return [tokens[: len(request.committed) + index] for index in range(len(request.draft_token_ids) + 1)]


def proposal_after(table: int, request: ProposalRequest, path: Sequence[int]) -> Proposal:
    """The draft's proposal for the token after `path`, and its guesses at others."""
    law, weights = request.law, weights_of(table, True, path)
    total = sum(weights)
    order = ranked(law, weights, len(path))
    row = None
    if law.rule is Rule.REJECTION:
        row = row_of(weights)
        token = drawn(weights, request.draw_bits)
        order = (token, *(other for other in order if other != token))
    return Proposal(tuple((token, weights[token] / total) for token in order[: 1 + request.branch_count]), row)
