"""The values that all services share: sampling parameters, draft distributions, sampler outputs, verdicts.

Frozen and checked at construction, so every instance is valid. This module knows neither wire nor tensors;
`specdec.rpc.convert` turns these values into messages and back.
"""

from __future__ import annotations

import enum
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.errors import InvalidRequest
from specdec.protocol.fields import CommonSamplingParams
from specdec.protocol.heads import HeadProposals
from specdec.protocol.limits import (
    BAD_WORD_TOKEN_COUNT_MAX,
    CONFIDENCE_MAX,
    DRAFT_PROBS_TOKEN_COUNT_MAX,
    PARAMS_BAD_WORD_COUNT_MAX,
    PARAMS_STOP_TOKEN_COUNT_MAX,
    SEED_MAX,
    TOKENS_MAX,
    check_ascending,
    check_count,
    check_integer,
)

DRAFT_PROBS_WEIGHT_MAX = 0xFFFF
# The weights of a draft distribution: sixteen to the octave, so neighbours differ by 4 %. Integers, so that no two
# machines round them differently: the first sixteen are 65535 * 2**(-i / 16).
DRAFT_PROBS_STEPS_PER_OCTAVE = 16
DRAFT_PROBS_WEIGHTS = tuple(
    weight >> octave
    for octave in range(16)
    for weight in (65535, 62757, 60096, 57548, 55108, 52772, 50534, 48392)
    + (46340, 44376, 42494, 40693, 38967, 37315, 35733, 34218)
)
DRAFT_PROBS_WEIGHT_CODES = {weight: code for code, weight in reversed(list(enumerate(DRAFT_PROBS_WEIGHTS)))}
CONFIDENCE_EDGES = (0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
assert len(CONFIDENCE_EDGES) + 1 == CONFIDENCE_MAX
PROTOCOL_VERSION = 8


class Rule(enum.Enum):
    """The verification rule by which the coordinator accepts draft tokens (docs/exactness.md)."""

    GREEDY = 1
    REJECTION = 2
    COUPLED = 3


class DraftVocabulary(enum.Enum):
    """The relation of a draft's tokens to its target's: the same, a part of them, or those of another tokenizer."""

    EQUAL = 0
    SUBSET = 1
    MAPPED = 2


class Proposer(enum.IntEnum):
    """A source of draft tokens; NONE: of a token that was not proposed."""

    NONE = 0
    DRAFT = 1
    NGRAM = 2
    SUFFIX = 3
    PREDICTION = 4
    HEADS = 5
    GRAMMAR = 6


class TokenKind(enum.IntEnum):
    """The origin of an output token."""

    ACCEPTED = 1
    RECOVERED = 2
    BONUS = 3


# Of an output token in a record: an accepted draft token, one in place of a rejected draft token, one without.
RECORD_SIGNS = {TokenKind.ACCEPTED: "1", TokenKind.RECOVERED: "0", TokenKind.BONUS: "-"}


class FinishReason(enum.Enum):
    """The reason for the end of a text."""

    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class ResolvedSamplingParams(CommonSamplingParams):
    """Sampling parameters with defaults filled in, and the rule and seed of the draws (see decoding/distribution.py).

    `prompt_length`: positions from there on are output; those before `encoder_length` are an encoder's input.
    `stop_token_ids` are masked while fewer than `min_tokens`
    output tokens come before a position. `end_token_ids`: those of the target, with a grammar only, which makes them
    legal where the output may end. `bad_words`: tokens in a row that the output does not contain. `logprobs`: None for
    none, n for the n likeliest beside the token itself.
    """

    rule: Rule
    seed: int
    prompt_length: int
    stop_token_ids: tuple[int, ...] = field(default=(), kw_only=True)
    end_token_ids: tuple[int, ...] = field(default=(), kw_only=True)
    bad_words: tuple[tuple[int, ...], ...] = field(default=(), kw_only=True)
    encoder_length: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_integer("seed", self.seed, 0, SEED_MAX)
        check_integer("prompt_length", self.prompt_length, 1, TOKENS_MAX)
        if not 0 <= self.encoder_length < self.prompt_length:
            limit = (
                f"at least 0 and below prompt_length {self.prompt_length}: a token after the input begins the output"
            )
            raise InvalidRequest("encoder_length", self.encoder_length, limit)
        is_greedy = self.rule is Rule.GREEDY
        if is_greedy != (self.temperature == 0):
            limit = "0 with rule GREEDY" if is_greedy else f"above 0 with rule {self.rule.name}"
            raise InvalidRequest("temperature", self.temperature, limit)
        self.check_common()
        check_ascending("logit_bias", tuple(token_id for token_id, _ in self.logit_bias))
        check_ascending("stop_token_ids", self.stop_token_ids)
        check_count("stop_token_ids", self.stop_token_ids, PARAMS_STOP_TOKEN_COUNT_MAX, "ids")
        check_ascending("end_token_ids", self.end_token_ids)
        check_count("end_token_ids", self.end_token_ids, PARAMS_STOP_TOKEN_COUNT_MAX, "ids")
        if (self.grammar is None) == bool(self.end_token_ids):
            limit = "empty without a grammar" if self.grammar is None else "the target's end tokens, with a grammar"
            raise InvalidRequest("end_token_ids", list(self.end_token_ids), limit)
        check_ascending("allowed_token_ids", self.allowed_token_ids)
        check_count("bad_words", self.bad_words, PARAMS_BAD_WORD_COUNT_MAX, "words")
        for index, word in enumerate(self.bad_words):
            check_integer(f"bad_words[{index}]", len(word), 1, BAD_WORD_TOKEN_COUNT_MAX)

    @property
    def has_penalties(self) -> bool:
        """Whether the distribution at a position depends on the tokens before it, beside the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """The draft distribution that a draft token was drawn from, as sent: probability = weight / total.

    Ids strictly ascending, weights from 1 to 65535; otherwise raises InvalidRequest.
    """

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.token_ids) <= DRAFT_PROBS_TOKEN_COUNT_MAX:
            raise InvalidRequest(
                "draft_probs.token_ids", len(self.token_ids), f"1 to {DRAFT_PROBS_TOKEN_COUNT_MAX} ids"
            )
        if len(self.weights) != len(self.token_ids):
            raise InvalidRequest(
                "draft_probs.weights", len(self.weights), f"as many as token ids, {len(self.token_ids)}"
            )
        check_ascending("draft_probs.token_ids", self.token_ids)
        if self.token_ids[0] < 0:
            raise InvalidRequest("draft_probs.token_ids", self.token_ids[0], "at least 0")
        if not 1 <= min(self.weights) <= max(self.weights) <= DRAFT_PROBS_WEIGHT_MAX:
            raise InvalidRequest(
                "draft_probs.weights", min(self.weights), f"integers from 1 to {DRAFT_PROBS_WEIGHT_MAX}"
            )

    @property
    def total(self) -> int:
        return sum(self.weights)

    @property
    def probabilities(self) -> tuple[float, ...]:
        """weight / total of every token id in order: the same float64 values as from `probability`."""
        total = self.total
        return tuple(weight / total for weight in self.weights)

    def probability(self, token_id: int) -> float:
        """Returns weight / total as float64; 0 for a token without weight."""
        if token_id not in self.token_ids:
            return 0.0
        return self.weights[self.token_ids.index(token_id)] / self.total

    def without(self, token_ids: Sequence[int]) -> DraftProbs:
        """Returns the distribution of a draw that is none of these tokens: itself if it gives them no weight.

        The distribution of a sibling drawn after them, without replacement. Raises InvalidRequest if no token is left.
        """
        if not any(token_id in self.token_ids for token_id in token_ids):
            return self
        kept = [entry for entry in zip(self.token_ids, self.weights) if entry[0] not in token_ids]
        return DraftProbs(tuple(token_id for token_id, _ in kept), tuple(weight for _, weight in kept))

    def check_proposal(self, token_id: int, vocabulary_size: int) -> None:
        """Raises InvalidRequest unless ids are in range and `token_id` has weight: otherwise it must not be tested."""
        if self.token_ids[-1] >= vocabulary_size:
            raise InvalidRequest(
                "draft_probs.token_ids", self.token_ids[-1], f"below the vocabulary size {vocabulary_size}"
            )
        if token_id not in self.token_ids:
            raise InvalidRequest(
                "draft_probs", f"without draft token {token_id}", "a distribution that holds the draft token"
            )


def point_mass(token_id: int) -> DraftProbs:
    """Returns the draft distribution of a proposer that does not draw: all weight on its token."""
    return DraftProbs((token_id,), (DRAFT_PROBS_WEIGHT_MAX,))


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-softmax of the raw logits at one position: of one token, and of the likeliest ones."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class PromptLogprobs(NamedTuple):
    """Log-softmax of the raw logits at some tokens of a prompt, from index `first_index` on, which is at least 1: the
    first token follows nothing. `ranks`: of each token among all, from 1; `top_token_ids` and `top_logprobs` are
    [tokens, n] in row-major order, likeliest first."""

    first_index: int
    token_ids: Sequence[int]
    logprobs: MutableSequence[float]
    ranks: MutableSequence[int]
    top_token_ids: MutableSequence[int]
    top_logprobs: MutableSequence[float]

    @property
    def end_index(self) -> int:
        """The index after the last of these tokens."""
        return self.first_index + len(self.token_ids)


class DraftNode(NamedTuple):
    """One draft token; `parent_id` 0 is the root.

    `draft_probs` only on a proposal child under REJECTION; siblings drawn from it without replacement have the names
    that follow.
    `confidence`: bin of CONFIDENCE_EDGES, from 1; 0 if unknown.
    """

    node_id: int
    parent_id: int
    token_id: int
    proposal: bool
    draft_probs: DraftProbs | None = None
    confidence: int = 0


class SamplerOutput(NamedTuple):
    """The sampler output of one verification: a row after the committed tokens, and one after each draft token.

    `recovered_token_ids`: one per row, the target's token if no child of the row is accepted. `target_probs`: one per
    draft token under REJECTION, else empty: its probability in what is left of the target distribution of its parent's
    row when the siblings before it are rejected. `draft_logprobs`: of each draft token in its parent's row, and
    `recovered_logprobs`: per row, of the recovered token and the likeliest ones, if requested, else empty.
    `head_proposals`: if requested, and the target has heads; `head_nodes`: of its feature head, below the token that
    the round commits last, parents before children, named from 1.
    """

    recovered_token_ids: tuple[int, ...]
    target_probs: tuple[float, ...] = ()
    draft_logprobs: tuple[float, ...] = ()
    recovered_logprobs: tuple[PositionLogprobs, ...] = ()
    head_proposals: HeadProposals | None = None
    head_nodes: tuple[DraftNode, ...] = ()


class Verdict(NamedTuple):
    """The verdict of the rule: the draft tokens `accepted`, by index; the recovered or bonus token follows."""

    accepted: tuple[int, ...]
    next_token_id: int
    next_kind: TokenKind

    @property
    def accepted_count(self) -> int:
        return len(self.accepted)

    @property
    def last_row(self) -> int:
        """The row of the sampler output after the accepted tokens."""
        return self.accepted[-1] + 1 if self.accepted else 0


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The capacity of a replica's KV cache: blocks that sessions can use, and the positions of a block."""

    block_count: int
    block_size: int
    byte_count: int

    @property
    def position_count(self) -> int:
        """The positions of all blocks together."""
        return self.block_count * self.block_size

    def sentence(self, positions_max: int) -> str:
        """Returns the size in words; a session of full length has `positions_max` positions."""
        full_count = self.block_count // -(-positions_max // self.block_size)
        return (
            f"{self.block_count} blocks of {self.block_size} positions, {self.byte_count / 2**20:.1f} MiB: "
            f"{self.position_count} positions, {full_count} sessions of full length ({positions_max})"
        )


def kind_of(has_encoder: bool) -> str:
    """Returns what a model is, in words."""
    return "an encoder-decoder model" if has_encoder else "a decoder alone"


@dataclass(frozen=True, slots=True)
class Description:
    """The model that a replica serves, and its numerics; equal digests mean equal weights.

    `step_times`: (rows, seconds) of steps for one session, measured after loading, ascending by rows: rows of one
    verification for a target, nodes for a draft. Empty without measurements. `trace_service`: service.name of the spans
    it records, empty if it records none. `draft_vocabulary_size`: number of the ids it proposes, 0: all;
    `draft_vocabulary_share`: of the tokens of a sample text, 0 to 1. `num_heads`: of a target, that propose tokens;
    `head_times`: (sessions, seconds) that they add to a step. `head_passes_max`: of a target's feature head behind one
    verification, 0 without one; `head_pass_times`: (rows, seconds) of a pass. `instance`: of the process that answers.
    An encoder-decoder model takes an input of at most `encoder_positions_max` tokens, and begins an output with
    `beginning_token_ids`; of a decoder alone these are 0 and empty.
    """

    model_digest: str
    tokenizer_fingerprint: str
    model_name: str
    vocabulary_size: int
    positions_max: int
    end_token_ids: tuple[int, ...]
    dtype: str
    device: str
    libraries: str
    tensor_parallel_size: int = 1
    protocol_version: int = PROTOCOL_VERSION
    cache: CacheSize | None = None
    step_times: tuple[tuple[int, float], ...] = ()
    trace_service: str = ""
    draft_vocabulary_size: int = 0
    draft_vocabulary: DraftVocabulary = DraftVocabulary.EQUAL
    draft_vocabulary_share: float = 1.0
    num_heads: int = 0
    head_times: tuple[tuple[int, float], ...] = ()
    head_passes_max: int = 0
    head_pass_times: tuple[tuple[int, float], ...] = ()
    instance: str = ""
    encoder_positions_max: int = 0
    beginning_token_ids: tuple[int, ...] = ()

    @property
    def has_encoder(self) -> bool:
        """Whether it is an encoder-decoder model."""
        return self.encoder_positions_max > 0

    @property
    def kind(self) -> str:
        """What it is, in words."""
        return kind_of(self.has_encoder)

    @property
    def numerics(self) -> tuple[str, str, str, int]:
        """What decides rounding: with one digest and equal numerics GREEDY and COUPLED give equal texts."""
        return self.dtype, self.device, self.libraries, self.tensor_parallel_size

    @property
    def draft_vocabulary_sentence(self) -> str:
        """The relation of the draft's tokens to the target's; empty if they are the same."""
        if self.draft_vocabulary is DraftVocabulary.EQUAL:
            return ""
        kind = "has another tokenizer" if self.draft_vocabulary is DraftVocabulary.MAPPED else "is a part of the target"
        count = f"{self.draft_vocabulary_size:,} of {self.vocabulary_size:,} tokens"
        return f"the draft {kind}: it proposes {count}, {self.draft_vocabulary_share:.0%} of those in a sample text"
