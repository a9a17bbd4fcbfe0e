"""The reports of a generation: its start, its tokens, the record of each round, its end and its statistics.

`Statistics` is the one place that names a statistic: the field has the name in the message and in a trace's attributes,
and defines the series of the metrics page that sums it over generations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import accumulate, zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

from specdec.protocol.items import Nodes, Verification
from specdec.protocol.limits import DELTA_TOKEN_COUNT_MAX, UINT32_MAX
from specdec.protocol.policy import Prediction
from specdec.protocol.records import RoundRecord
from specdec.protocol.types import (
    Description,
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
    Proposer,
    Rule,
    TokenKind,
)

SUMMED_TIMES_PER_S = 2**20


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted; `seed` and `rule` are those in force, `rule_reason` is the reason for the rule.
    `encoder_length`: of the prompt's tokens, those that are an encoder's input."""

    request_id: str
    seed: int
    rule: Rule
    prompt_length: int
    max_tokens: int
    rule_reason: str = ""
    encoder_length: int = 0


def summable_s(time_s: float) -> float:
    """Returns a time in whole units of 2**-20 s. Sums of such times are exact below 272 years, so they are equal in any
    order, and a counter does not fall by a rounding when a generation ends and its sum moves to that of ended ones."""
    return round(time_s * SUMMED_TIMES_PER_S) / SUMMED_TIMES_PER_S


class Round(NamedTuple):
    """A round for the client: its draft tokens in depth-first order (`parents`: protocol.tree_shape), the surest
    proposer of each, the indices of the accepted ones, the number of its output tokens, its time, and the parts of it
    that `Statistics` sums, in the same units."""

    round_index: int
    draft_token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    proposers: tuple[Proposer, ...]
    accepted: tuple[int, ...]
    num_output_tokens: int
    round_s: float
    draft_wait_s: float = 0.0
    target_queue_s: float = 0.0
    target_forward_s: float = 0.0
    target_sampling_s: float = 0.0
    target_link_s: float = 0.0
    target_heads_s: float = 0.0

    @classmethod
    def of(cls, record: RoundRecord, asked: Verification, accepted: tuple[int, ...]) -> Round:
        """Returns a round by its record, its verification and the verdict on it."""
        tokens, times, step = record.tokens, record.times, record.step
        return cls(
            record.round_index,
            asked.draft_token_ids,
            asked.parents,
            tokens.proposers,
            accepted,
            tokens.kept_count,
            times.round_s,
            summable_s(times.wait_s),
            summable_s(record.server_wait_s),
            summable_s(step.forward_s),
            summable_s(step.sampling_s),
            summable_s(times.round_trip_s - record.server_share_s),
            summable_s(step.head_s),
        )


class Delta(NamedTuple):
    """Tokens that became final, and the text that became final with them: `text_lengths[i]` characters with token i.
    `proposers`: of each token, NONE for one that was not accepted. `rounds`: those of the tokens, `statistics`: of the
    stream so far; each where the request asks for it."""

    first_output_index: int
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    text: str
    text_lengths: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    proposers: tuple[Proposer, ...] = ()
    rounds: tuple[Round, ...] = ()
    statistics: Statistics | None = None

    def merged(self, later: Delta) -> Delta:
        """Returns this delta and the next one as one."""
        return Delta(
            self.first_output_index,
            self.token_ids + later.token_ids,
            self.kinds + later.kinds,
            self.text + later.text,
            self.text_lengths + later.text_lengths,
            self.logprobs + later.logprobs,
            self.proposers + later.proposers,
            self.rounds + later.rounds,
            later.statistics,
        )

    def parts(self) -> Iterator[Delta]:
        """Yields this delta in deltas of at most DELTA_TOKEN_COUNT_MAX tokens, each with its own text and rounds, the
        last one with the statistics."""
        if len(self.token_ids) <= DELTA_TOKEN_COUNT_MAX:
            yield self
            return
        round_ends = list(accumulate(own.num_output_tokens for own in self.rounds))
        start, text_start = 0, 0
        for end in part_ends(round_ends or range(1, len(self.token_ids) + 1)):
            own = slice(start, end)
            lengths = self.text_lengths[own]
            text_end = text_start + sum(lengths)
            text = self.text[text_start:text_end]
            first = self.first_output_index + start
            rounds = self.rounds[bisect_right(round_ends, start) : bisect_right(round_ends, end)]
            statistics = self.statistics if end == len(self.token_ids) else None
            parts = self.logprobs[own], self.proposers[own], rounds, statistics
            yield Delta(first, self.token_ids[own], self.kinds[own], text, lengths, *parts)
            start, text_start = end, text_end


def part_ends(ends: Iterable[int]) -> Iterator[int]:
    """Yields the ends, among those given, of parts of at most DELTA_TOKEN_COUNT_MAX tokens, each as long as it can."""
    start = last = 0
    for end in ends:
        if end - start > DELTA_TOKEN_COUNT_MAX:
            yield last
            start = last
        last = end
    yield last


@dataclass(frozen=True, slots=True)
class Series:
    """The series of a statistic on the metrics page: the metric's name and help, and its label's name and value."""

    name: str
    help: str = ""  # once per metric
    label: tuple[str, str] = ("", "")


def summed(name: str = "", help: str = "", label: tuple[str, str] = ("", ""), is_traced: bool = False) -> Any:
    """Returns the field of a statistic summed over generations, with its series; `is_traced`: also on the root span."""
    return field(default=0, metadata={"series": name and Series(name, help, label), "is_traced": is_traced})


traced = partial(summed, is_traced=True)


def of_proposer(name: str, help: str, proposer: str) -> Any:
    """Returns the field of a statistic summed over generations, of one proposer."""
    return traced(name, help, ("proposer", proposer))


# The statistics of each proposer: draft tokens, accepted ones.
PROPOSER_FIELDS = {
    Proposer.DRAFT: ("num_model_draft_tokens", "num_model_accepted_tokens"),
    Proposer.NGRAM: ("num_ngram_draft_tokens", "num_ngram_accepted_tokens"),
    Proposer.SUFFIX: ("num_suffix_draft_tokens", "num_suffix_accepted_tokens"),
    Proposer.PREDICTION: ("num_prediction_draft_tokens", "num_prediction_accepted_tokens"),
    Proposer.HEADS: ("num_heads_draft_tokens", "num_heads_accepted_tokens"),
    Proposer.GRAMMAR: ("num_grammar_draft_tokens", "num_grammar_accepted_tokens"),
}


@dataclass(slots=True)
class Statistics:
    """The statistics of one stream, counted round by round. Times in seconds, summed over rounds."""

    rounds: int = traced("specdec_rounds", "Verifications that were answered and committed.")
    num_spec_steps: int = traced("vllm:spec_decode_num_drafts", "Rounds that offered draft tokens.")
    num_draft_tokens: int = traced("vllm:spec_decode_num_draft_tokens", "Draft tokens offered.")
    num_accepted_draft_tokens: int = traced("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
    draft_link_bytes: int = traced(
        "specdec_link_payload_bytes", "Payload to and from a replica for generations, without pings.", ("peer", "draft")
    )
    target_link_bytes: int = traced("specdec_link_payload_bytes", label=("peer", "target"))
    draft_waits_expired: int = traced(
        "specdec_draft_waits_expired", "Verifications whose wait for draft tokens expired."
    )
    num_evaluated_nodes: int = traced(
        "specdec_draft_tokens_received",
        "Draft tokens received: proposal (a path goes on there, or drawn) or branch (a guess beside it).",
        ("kind", "proposal"),
    )
    num_branch_nodes: int = summed("specdec_draft_tokens_received", label=("kind", "branch"))
    num_recovered_lookups: int = summed(
        "specdec_tree_lookups",
        "Recovered and bonus tokens at whose position the tree had children, by kind of token.",
        ("next", "recovered"),
    )
    num_bonus_lookups: int = summed("specdec_tree_lookups", label=("next", "bonus"))
    num_recovered_hits: int = traced(
        "specdec_tree_hits",
        "Such tokens that were a child with draft tokens below; of a recovered token: a branch hit.",
        ("next", "recovered"),
    )
    num_bonus_hits: int = summed("specdec_tree_hits", label=("next", "bonus"))
    num_branch_tokens_accepted: int = summed()
    num_rounds_off: int = traced(
        "specdec_rounds_without_speculation", "Rounds in which the policy in force did not speculate."
    )
    num_paths: int = traced("specdec_verified_paths", "Paths of verifications with draft tokens.")
    num_model_draft_tokens: int = of_proposer("specdec_proposed_tokens", "Draft tokens offered, by proposer.", "draft")
    num_model_accepted_tokens: int = of_proposer("specdec_proposed_accepted_tokens", "Accepted ones.", "draft")
    num_ngram_draft_tokens: int = of_proposer("specdec_proposed_tokens", "", "ngram")
    num_ngram_accepted_tokens: int = of_proposer("specdec_proposed_accepted_tokens", "", "ngram")
    num_suffix_draft_tokens: int = of_proposer("specdec_proposed_tokens", "", "suffix")
    num_suffix_accepted_tokens: int = of_proposer("specdec_proposed_accepted_tokens", "", "suffix")
    num_prediction_draft_tokens: int = of_proposer("specdec_proposed_tokens", "", "prediction")
    num_prediction_accepted_tokens: int = of_proposer("specdec_proposed_accepted_tokens", "", "prediction")
    num_heads_draft_tokens: int = of_proposer("specdec_proposed_tokens", "", "heads")
    num_heads_accepted_tokens: int = of_proposer("specdec_proposed_accepted_tokens", "", "heads")
    num_grammar_draft_tokens: int = of_proposer("specdec_proposed_tokens", "", "grammar")
    num_grammar_accepted_tokens: int = of_proposer("specdec_proposed_accepted_tokens", "", "grammar")
    num_target_changes: int = traced()
    num_draft_changes: int = traced()
    num_rounds_exploring: int = traced()
    exploration_loss_s: float = summed()
    cached_prompt_tokens: int = traced("specdec_cached_prompt_tokens", "Prompt tokens the target found in its cache.")
    prompt_tokens: int = summed("vllm:prompt_tokens", "Prompt tokens of admitted requests.")
    encoder_tokens: int = traced("specdec_encoder_tokens", "Those of them that are an encoder's input.")
    output_tokens: int = summed("vllm:generation_tokens", "Output tokens generated, without resumed ones.")
    draft_refusals: int = summed(
        "specdec_draft_refusals", "Refusals of a draft to draft for a generation: too few cells or no positions left."
    )
    step_sessions: int = summed()
    active_sessions: int = summed()
    preemptions: int = traced("vllm:num_preemptions", "Preemptions by the target, of generations of this coordinator.")
    draft_wait_s: float = summed(
        "specdec_round_time_seconds",
        "Time of all generations by part of the round, summed over rounds.",
        ("part", "draft_wait"),
    )
    target_queue_s: float = summed("specdec_round_time_seconds", label=("part", "target_queue"))
    target_forward_s: float = summed("specdec_round_time_seconds", label=("part", "target_forward"))
    target_sampling_s: float = summed("specdec_round_time_seconds", label=("part", "target_sampling"))
    target_link_s: float = summed("specdec_round_time_seconds", label=("part", "target_link"))
    target_heads_s: float = summed("specdec_round_time_seconds", label=("part", "target_heads"))
    acceptance_histogram: list[int] = field(default_factory=list)
    predicted_tokens_per_s: float = 0.0
    policy_reason: str = ""
    rule: Rule = Rule.GREEDY
    rule_reason: str = ""
    time_to_first_token_s: float = 0.0
    total_s: float = 0.0
    follows_branch_hit: bool = False  # no statistic

    def on_nodes(self, nodes: Nodes) -> None:
        """Counts the nodes of one draft step."""
        evaluated_count = sum(node.proposal for node in nodes.nodes)
        self.num_evaluated_nodes += evaluated_count
        self.num_branch_nodes += len(nodes.nodes) - evaluated_count

    def on_round(self, record: RoundRecord) -> None:
        """Counts one round."""
        tokens, tree, times, step = record.tokens, record.tree, record.times, record.step
        self.rounds += 1
        self.output_tokens += tokens.kept_count
        self.step_sessions += step.sessions
        self.active_sessions += step.active_sessions
        # What the target says, in fields of 32 bits: its sums end there.
        self.cached_prompt_tokens = min(UINT32_MAX, self.cached_prompt_tokens + step.cached_prompt_tokens)
        self.preemptions = min(UINT32_MAX, self.preemptions + step.preemptions)
        self.draft_wait_s += summable_s(times.wait_s)
        self.target_queue_s += summable_s(record.server_wait_s)
        self.target_forward_s += summable_s(step.forward_s)
        self.target_sampling_s += summable_s(step.sampling_s)
        self.target_link_s += summable_s(times.round_trip_s - record.server_share_s)
        self.target_heads_s += summable_s(step.head_s)
        self.total_s += times.round_s
        if self.rounds == 1:
            self.time_to_first_token_s = times.round_s
        self.num_rounds_off += not record.is_speculating
        if self.follows_branch_hit:
            self.num_branch_tokens_accepted += tokens.accepted_count
        self.follows_branch_hit = False
        if tree.was_looked_up:
            self.follows_branch_hit = record.is_branch_hit
            if tokens.next_kind is TokenKind.RECOVERED:
                self.num_recovered_lookups += 1
                self.num_recovered_hits += record.is_hit
            else:
                self.num_bonus_lookups += 1
                self.num_bonus_hits += record.is_hit
        if tokens.offered_count:
            self.num_spec_steps += 1
            self.num_paths += tokens.path_count
            self._count_proposers(record)
            self.num_draft_tokens += tokens.offered_count
            self.num_accepted_draft_tokens += tokens.accepted_count
            missing = tokens.accepted_count + 1 - len(self.acceptance_histogram)
            self.acceptance_histogram.extend([0] * missing)
            self.acceptance_histogram[tokens.accepted_count] += 1

    def _count_proposers(self, record: RoundRecord) -> None:
        for index, proposers in enumerate((record.tokens.proposers, record.tokens.accepted_proposers)):
            for proposer in {*proposers}:
                name = PROPOSER_FIELDS[proposer][index]
                setattr(self, name, getattr(self, name) + proposers.count(proposer))

    def conclude(self, prediction: Prediction) -> None:
        """Sets what the policy says at the end."""
        self.predicted_tokens_per_s, self.policy_reason = prediction.tokens_per_s or 0.0, prediction.reason
        self.num_rounds_exploring = prediction.num_rounds_exploring
        self.exploration_loss_s = prediction.exploration_loss_s

    def add(self, other: Statistics) -> None:
        """Adds the summable statistics of another stream."""
        for name in SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        both = zip_longest(self.acceptance_histogram, list(other.acceptance_histogram), fillvalue=0)
        self.acceptance_histogram = list(map(sum, both))

    def snapshot(self) -> Statistics:
        """Returns a copy."""
        copied = Statistics(*VALUES(self))
        copied.acceptance_histogram = self.acceptance_histogram.copy()
        return copied

    @property
    def observed_tokens_per_s(self) -> float:
        """The rate of the stream from its first token on; 0 before the second."""
        seconds = self.total_s - self.time_to_first_token_s
        return (self.output_tokens - 1) / seconds if seconds > 0 else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / speculating rounds; 1 when there were none."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / draft tokens; 0 when there were none."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


VALUES = attrgetter(*(own.name for own in fields(Statistics)))
SUMMED = tuple(own.name for own in fields(Statistics) if own.metadata)
TRACED = tuple(own.name for own in fields(Statistics) if own.metadata.get("is_traced"))
SERIES = tuple((own.name, own.metadata["series"]) for own in fields(Statistics) if own.metadata.get("series"))


@dataclass(frozen=True, slots=True)
class Moved:
    """The output tokens from `first_output_index` on come from a target of other numerics, `target`."""

    first_output_index: int
    target: Description


@dataclass(frozen=True, slots=True)
class Finished:
    """The text ended. `encoder_tokens`: of the prompt's, those that are an encoder's input."""

    reason: FinishReason
    stop_string: str
    stop_token_id: int | None
    prompt_tokens: int
    output_tokens: int
    statistics: Statistics
    trace_id: str
    encoder_tokens: int = 0


Event = Started | PromptLogprobs | Delta | Moved | Finished
