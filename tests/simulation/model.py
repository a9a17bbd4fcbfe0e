"""Table models in pure Python: the next token's weights depend on the last two tokens.

They restate what `specdec.decoding` does with logits, in integer arithmetic over a handful of tokens: they are the
models of the simulation, not a check of that package (tests/exactness is). Cache contents replace logits: the
tokens are written to paged storage and read back through the block table, so an error in rollback, forking or block
ownership changes the output, and is also noticed since every row's tokens are compared with its path.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from specdec.decoding.prompt_logprobs import PromptRows
from specdec.decoding.proposal import Proposal, ProposalRequest
from specdec.decoding.verification import VerificationRequest
from specdec.engine.interface import RaggedBatch, StepOutput
from specdec.protocol.heads import HEAD_CANDIDATES, HeadProposals, HeadToken
from specdec.protocol.noise import UNIFORM_BITS, Lane, hash64, uniform_bits
from specdec.protocol.types import (
    CacheSize,
    Description,
    DraftProbs,
    PromptLogprobs,
    ResolvedSamplingParams,
    Rule,
    SamplerOutput,
)
from tests.simulation.clock import Clock, Violation
from tests.support.plain_noise import gumbel

VOCABULARY_SIZE = 6
BEFORE = VOCABULARY_SIZE  # the token before the text
HEAD_COUNT = 3
FINGERPRINT = "table"
PROFILE = 64  # tables of one profile; those of another have other weights in some contexts, as rounding does
DEVIATION = 0.1  # share of these contexts
AGREEMENT = 0.7  # share of contexts in which the draft's weights resemble the target's
TOKEN_IDS = tuple(range(VOCABULARY_SIZE))
NO_NOISE = (0.0,) * VOCABULARY_SIZE


def describe(positions_max: int, model: str, profile: int = 0, cache_size: CacheSize | None = None) -> Description:
    """The description of a replica with a table model, in a numerics profile."""
    names = f"digest of {model}", FINGERPRINT, model
    return Description(*names, VOCABULARY_SIZE, positions_max, (), "integer", "cpu", f"{profile}", cache=cache_size)


def table_of(table: int, description: Description) -> int:
    """The table by which a target of this profile decides, where profile 0 decides by `table`."""
    return table + PROFILE * int(description.libraries)


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
def weights_after(table: int, draft: int, before: int, last: int) -> tuple[int, ...]:
    """The weights of the next token, of the target (`draft` 0) or of a draft model, which agrees with it in most
    contexts."""
    context = before * (VOCABULARY_SIZE + 1) + last
    if table >= PROFILE and hash64(table, Lane.DRAFT, context, 98) % 1000 >= 1000 * DEVIATION:
        table %= PROFILE
    strays = draft and hash64(table, Lane.DRAFT, context, 98 + draft) % 1000 >= 1000 * AGREEMENT
    source = table + 1000 * bool(strays)
    weights = [7 * bool(draft) + 1 + (hash64(source, Lane.NEXT, context, token) % 14) ** 2 for token in TOKEN_IDS]
    if not strays:
        weights[likeliest_after(table).get((before, last), 0)] += 700
    return tuple(weights)


def weights_of(table: int, draft: int, tokens: Sequence[int]) -> tuple[int, ...]:
    """The weights of the token after `tokens`, of which there is at least one."""
    return weights_after(table, draft, tokens[-2] if len(tokens) > 1 else BEFORE, tokens[-1])


@lru_cache(maxsize=1 << 16)
def noise_at(seed: int, position: int) -> tuple[float, ...]:
    """The Gumbel noise of every token at a position."""
    return tuple(gumbel(seed, position, token) for token in TOKEN_IDS)


@lru_cache(maxsize=1 << 16)
def _ranked(weights: tuple[int, ...], noise: tuple[float, ...]) -> tuple[int, ...]:
    scores = [math.log(weight) + nudge for weight, nudge in zip(weights, noise)]
    return tuple(sorted(TOKEN_IDS, key=lambda token: (-scores[token], token)))


def ranked(params: ResolvedSamplingParams, weights: tuple[int, ...], position: int) -> tuple[int, ...]:
    """Token ids, best first, by weight (GREEDY and the guesses of REJECTION) or by perturbed score (COUPLED)."""
    return _ranked(weights, noise_at(params.seed, position) if params.rule is Rule.COUPLED else NO_NOISE)


@cache
def probs_of(weights: tuple[int, ...]) -> DraftProbs:
    """The draft distribution of all tokens with their weights."""
    return DraftProbs(TOKEN_IDS, weights)


def drawn(masses: Sequence[int], bits: int) -> int:
    """The index that a 53-bit integer picks out of integer masses."""
    left = bits * sum(masses) >> UNIFORM_BITS
    for index, mass in enumerate(masses):
        left -= mass
        if left < 0:
            return index
    raise AssertionError("bits are below 2**53")


def residual(weights: Sequence[int], row: DraftProbs) -> list[int]:
    """Integer masses in proportion to max(0, target - draft); the target's own where that is nothing."""
    total, row_total = sum(weights), row.total
    draft = dict(zip(row.token_ids, row.weights))
    masses = [max(0, weight * row_total - draft.get(token, 0) * total) for token, weight in enumerate(weights)]
    return masses if any(masses) else list(weights)


def plain_text(table: int, params: ResolvedSamplingParams, prompt: Sequence[int], length: int) -> list[int]:
    """`prompt` continued to `length` tokens by plain decoding, without any draft; GREEDY and COUPLED only."""
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(ranked(params, weights_of(table, 0, tokens), len(tokens))[0])
    return tokens


def without(row: DraftProbs, tokens: Sequence[int]) -> DraftProbs:
    """The draft distribution of a token drawn after these, which it is not."""
    kept = {token: weight for token, weight in zip(row.token_ids, row.weights) if token not in tokens}
    return DraftProbs(tuple(kept), tuple(kept.values()))


def children_of(request: VerificationRequest) -> list[list[int]]:
    """The draft tokens that follow each row: row 0 the committed tokens, row i + 1 draft token i."""
    following: list[list[int]] = [[] for _ in range(request.row_count)]
    for index, parent in enumerate(request.parents or range(len(request.draft_token_ids))):
        following[parent].append(index)
    return following


def output_at(table: int, request: VerificationRequest, paths: Sequence[Sequence[int]]) -> SamplerOutput:
    """SamplerOutput for a request whose row i comes after `paths[i]`."""
    params = request.params
    if params.rule is not Rule.REJECTION:
        return SamplerOutput(tuple(ranked(params, weights_of(table, 0, path), len(path))[0] for path in paths))
    recovered, probs = [], [0.0] * len(request.draft_token_ids)
    for path, following in zip(paths, children_of(request)):
        masses: Sequence[int] = weights_of(table, 0, path)
        tested: list[int] = []
        for index in following:
            token = request.draft_token_ids[index]
            probs[index] = masses[token] / sum(masses)
            masses = residual(masses, without(request.draft_probs[index], tested))
            tested.append(token)
        recovered.append(drawn(masses, uniform_bits(params.seed, Lane.NEXT, request.round_index, len(path))))
    return SamplerOutput(tuple(recovered), tuple(probs))


def round_tokens(table: int, request: VerificationRequest) -> list[int]:
    """The tokens a round must commit, computed independently: a function of its content, the seed and the round."""
    tokens, params, following = list(request.committed), request.params, children_of(request)
    row = 0
    while True:
        masses: Sequence[int] = weights_of(table, 0, tokens)
        tested: list[int] = []
        for rank, index in enumerate(following[row]):
            token, probs = request.draft_token_ids[index], without(request.draft_probs[index], tested)
            accept = uniform_bits(params.seed, Lane.ACCEPT, request.round_index, len(tokens) + (rank << 32))
            draft_weight = dict(zip(probs.token_ids, probs.weights))[token]
            if accept * draft_weight * sum(masses) < masses[token] * probs.total << UNIFORM_BITS:
                tokens.append(token)
                row = index + 1
                break
            masses = residual(masses, probs)
            tested.append(token)
        else:
            bits = uniform_bits(params.seed, Lane.NEXT, request.round_index, len(tokens))
            return [*tokens[len(request.committed) :], drawn(masses, bits)]


def prompt_scores(table: int, asked: PromptRows, paths: Sequence[Sequence[int]]) -> PromptLogprobs:
    """The log-probabilities of prompt tokens, each after its path."""
    found = PromptLogprobs(asked.first_index, list(asked.token_ids), [], [], [], [])
    for token, path in zip(found.token_ids, paths, strict=True):
        weights = weights_of(table, 0, path)
        logprobs, order = [math.log(weight / sum(weights)) for weight in weights], _ranked(weights, NO_NOISE)
        found.logprobs.append(logprobs[token])
        found.ranks.append(1 + order.index(token))
        found.top_token_ids.extend(order[: asked.top_count])
        found.top_logprobs.extend(logprobs[own] for own in order[: asked.top_count])
    return found


def heads_after(table: int, path: Sequence[int]) -> tuple[tuple[HeadToken, ...], ...]:
    """The candidates of each head after a row, likeliest first: the target's own likeliest text, or another where the
    head errs. As heads do, they depend on the row's path alone, not on the token that the round puts after it."""
    text, heads = list(path[-2:]), []
    for head in range(HEAD_COUNT + 1):
        order = _ranked(weights_of(table, 0, text), NO_NOISE)
        text.append(order[0])
        errs = hash64(table, Lane.DRAFT, path[-1] * VOCABULARY_SIZE + order[0], 500 + head) % 1000 >= 1000 * AGREEMENT
        heads.append(tuple(HeadToken(token, 100) for token in order[errs : errs + HEAD_CANDIDATES]))
    return tuple(heads[1:])


def head_proposals(table: int, path: Sequence[int]) -> HeadProposals:
    """The proposals of the heads after a row with this path."""
    tokens = [token for candidates in heads_after(table, path) for token in candidates]
    return HeadProposals(tuple(own.token_id for own in tokens), bytes(own.confidence for own in tokens))


class TokenStorage:
    """Token ids in blocks; a block that was not written holds no token."""

    def __init__(self, block_count: int, block_size: int) -> None:
        self.block_size = block_size
        self.empty = [-1] * block_size
        self.cells = [self.empty] * block_count

    def copy_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        values = [self.cells[slot // self.block_size][slot % self.block_size] for slot in sources]
        for slot, value in zip(destinations, values):
            self.write([slot // self.block_size], [slot % self.block_size], [value])

    def scrub(self, block_id: int, start: int, end: int) -> None:
        self.cells[block_id] = self.cells[block_id].copy()
        self.cells[block_id][start:end] = self.empty[start:end]

    def write(self, block_ids: Sequence[int], positions: Sequence[int], token_ids: Sequence[int]) -> None:
        """Writes tokens at these positions of a sequence."""
        size, cells = self.block_size, self.cells
        for position, token in zip(positions, token_ids):
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
        for chunk in batch.chunks:
            cells = [*range(chunk.start, chunk.base), *(path[-1] for path in chunk.paths)]
            storage.write(chunk.block_ids, cells, chunk.token_ids)
        rows = CachedRows()
        for chunk in batch.chunks:
            tokens = storage.read(chunk.block_ids, len(chunk.block_ids) * storage.block_size)
            seen = [tokens[:end] for end in range(chunk.start + 1, chunk.base + 1)]
            seen += [[*tokens[: chunk.base], *(tokens[cell] for cell in path)] for path in chunk.paths]
            rows += seen[len(seen) - chunk.logit_count :]
        self.clock.in_step_s += self.step_s(batch.row_count)
        return StepOutput(rows, (True,) * len(batch.chunks), rows)


def cached_paths(rows: CachedRows, wanted: Sequence[Sequence[int]]) -> CachedRows:
    """Returns the rows. Raises Violation unless each holds the tokens `wanted` of it."""
    for row, path in zip(rows, wanted):
        if row != list(path):
            raise Violation(f"the cache holds {row}, the path evaluated is {list(path)}")
    return rows


def verification_paths(request: VerificationRequest) -> list[list[int]]:
    """The path before each row of a verification."""
    paths = [list(request.committed)]
    for parent, token in zip(request.parents or range(len(request.draft_token_ids)), request.draft_token_ids):
        paths.append([*paths[parent], token])
    return paths


def proposal_after(table: int, draft: int, request: ProposalRequest, path: Sequence[int]) -> Proposal:
    """The proposal of a draft model for the token after `path`, and its guesses at others."""
    params, weights = request.params, weights_of(table, draft, path)
    total = sum(weights)
    order = ranked(params, weights, len(path))
    row = None
    if params.rule is Rule.REJECTION:
        row = probs_of(weights)
        taken: list[int] = []
        for bits in request.draws:
            taken.append(drawn([0 if token in taken else weight for token, weight in enumerate(weights)], bits))
        order = (*taken, *(other for other in order if other not in taken))
    return Proposal(tuple((token, weights[token] / total) for token in order[: 1 + request.branch_count]), row)
