"""What a generation tells: that it started, its tokens, each round as it went, how it ended and the sums of it all.

`Statistics` is the one place where a statistic has its names: the field is called as in the message and in a trace's
attributes, and names the series of the metrics page that sums it over generations.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from specdec.policy.policy import Plan
from specdec.protocol.items import Nodes
from specdec.protocol.types import FinishReason, PositionLogprobs, Rule, TokenKind


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted; `seed` and `rule` are those in force, `rule_reason` says why that rule."""

    request_id: str
    seed: int
    rule: Rule
    prompt_length: int
    max_tokens: int
    rule_reason: str = ""


class Delta(NamedTuple):
    """Tokens that became final, and the text that became certain: `text_lengths[i]` characters of it with token i."""

    first_output_index: int
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    text: str
    text_lengths: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()

    def merged(self, later: Delta) -> Delta:
        """This delta and the one right after it as one."""
        return Delta(
            self.first_output_index,
            self.token_ids + later.token_ids,
            self.kinds + later.kinds,
            self.text + later.text,
            self.text_lengths + later.text_lengths,
            self.logprobs + later.logprobs,
        )


class RoundRecord(NamedTuple):
    """A round from the verdict before it (the start, for round 0) to its own. Times in seconds by the monotonic clock.

    `plan`: in force when the verification was sent. `kept_count`: tokens that count, fewer than accepted + 1 only where
    the text ended. `was_looked_up`: the tree had a child for the next token's place; `was_found`: the next token was
    one. `in_hand_count`: draft tokens in hand for the next round at once; `discarded_count`: of the proposal path in
    hand, those the commit left. `wait_s`: held back for draft tokens; `round_trip_s`: from sending the verification to
    its answer; `queue_s`, `forward_s`, `evidence_s` of the target's step; `step_rows` and `step_sessions` of all
    sessions in it, of `active_sessions` with work to do; `step_count` above 1: a prompt, or what was opened again, was
    read. `cached_prompt_tokens` are told with the first round, `evictions` since the round before.
    `is_speculating`: the policy drafts, though the plan may have had no room to.
    """

    round_index: int
    plan: Plan
    offered_count: int
    accepted_count: int
    kept_count: int
    next_kind: TokenKind
    was_looked_up: bool
    was_found: bool
    in_hand_count: int
    discarded_count: int
    start_s: float
    end_s: float
    wait_s: float
    round_trip_s: float
    queue_s: float
    forward_s: float
    evidence_s: float
    step_rows: int = 1
    step_sessions: int = 1
    active_sessions: int = 1
    step_count: int = 1
    cached_prompt_tokens: int = 0
    evictions: int = 0
    server_s: float = 0.0
    is_speculating: bool = True

    @property
    def round_s(self) -> float:
        """From verdict to verdict."""
        return self.end_s - self.start_s

    @property
    def step_s(self) -> float:
        """Of the target's step: forward and evidence."""
        return self.forward_s + self.evidence_s

    @property
    def is_hit(self) -> bool:
        """Whether the next round starts with draft tokens below a next token that was foreseen."""
        return self.was_found and self.in_hand_count > 0

    @property
    def is_branch_hit(self) -> bool:
        """Whether that next token was a correction: a branch child came true."""
        return self.is_hit and self.next_kind is TokenKind.CORRECTION


@dataclass(frozen=True, slots=True)
class Series:
    """Where a statistic stands on the metrics page: a family's name and help, and the value of its label if any."""

    name: str
    help: str = ""  # once in a family
    label: tuple[str, str] = ("", "")


def summed(name: str = "", help: str = "", label: tuple[str, str] = ("", ""), is_traced: bool = False) -> Any:
    """A statistic that adds up over generations, and its series if it has one; `is_traced`: on the root span too."""
    return field(default=0, metadata={"series": name and Series(name, help, label), "is_traced": is_traced})


traced = partial(summed, is_traced=True)


@dataclass(slots=True)
class Statistics:
    """How speculation went in one stream, counted round by round. Times in seconds, summed over rounds."""

    rounds: int = traced("specdec_rounds", "Verifications that were answered and committed.")
    num_spec_steps: int = traced("vllm:spec_decode_num_drafts", "Rounds that offered draft tokens.")
    num_draft_tokens: int = traced("vllm:spec_decode_num_draft_tokens", "Draft tokens offered.")
    num_accepted_draft_tokens: int = traced("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
    draft_link_bytes: int = traced(
        "specdec_link_payload_bytes", "Payload to and from a replica for generations, without pings.", ("peer", "draft")
    )
    target_link_bytes: int = traced("specdec_link_payload_bytes", label=("peer", "target"))
    draft_waits_expired: int = traced(
        "specdec_draft_waits_expired", "Verifications that waited for draft tokens in vain."
    )
    num_evaluated_leaves: int = traced(
        "specdec_draft_tokens_received",
        "Draft tokens received: proposal (may be offered) or branch (stands by for a miss).",
        ("kind", "proposal"),
    )
    num_branch_leaves: int = summed("specdec_draft_tokens_received", label=("kind", "branch"))
    num_correction_lookups: int = summed(
        "specdec_tree_lookups",
        "Tokens of the target for whose place the tree had children, by kind of token.",
        ("next", "correction"),
    )
    num_bonus_lookups: int = summed("specdec_tree_lookups", label=("next", "bonus"))
    num_correction_hits: int = traced(
        "specdec_tree_hits",
        "Those of them that were a child with tokens below; of a correction: a branch hit.",
        ("next", "correction"),
    )
    num_bonus_hits: int = summed("specdec_tree_hits", label=("next", "bonus"))
    num_branch_tokens_accepted: int = summed()
    num_rounds_off: int = traced(
        "specdec_rounds_without_speculation", "Rounds in which the policy in force did not speculate."
    )
    num_rounds_trial: int = traced()
    trial_loss_s: float = summed()
    cached_prompt_tokens: int = traced("specdec_cached_prompt_tokens", "Prompt tokens the target found in its cache.")
    prompt_tokens: int = summed("specdec_prompt_tokens", "Prompt tokens of admitted requests.")
    output_tokens: int = summed("specdec_generation_tokens", "Output tokens generated; resumed ones are not.")
    draft_refusals: int = summed(
        "specdec_draft_refusals", "Times a draft would not draft for a generation: no room, or no more positions."
    )
    step_sessions: int = summed()
    active_sessions: int = summed()
    evictions: int = traced()
    draft_wait_s: float = summed(
        "specdec_round_time_seconds",
        "Where the time of all generations went, summed over rounds.",
        ("part", "draft_wait"),
    )
    target_queue_s: float = summed("specdec_round_time_seconds", label=("part", "target_queue"))
    target_forward_s: float = summed("specdec_round_time_seconds", label=("part", "target_forward"))
    target_evidence_s: float = summed("specdec_round_time_seconds", label=("part", "target_evidence"))
    target_link_s: float = summed("specdec_round_time_seconds", label=("part", "target_link"))
    acceptance_histogram: list[int] = field(default_factory=list)
    predicted_tokens_per_s: float = 0.0
    observed_tokens_per_s: float = 0.0
    policy_reason: str = ""
    rule: Rule = Rule.GREEDY
    rule_reason: str = ""
    time_to_first_token_s: float = 0.0
    total_s: float = 0.0
    began_s: float = 0.0  # by the monotonic clock; as `follows_branch_hit`, no statistic
    follows_branch_hit: bool = False

    def on_nodes(self, nodes: Nodes) -> int:
        """Counts what one draft step sent; returns the places it evaluated: each brings one proposal child."""
        evaluated_count = sum(node.proposal for node in nodes.nodes)
        self.num_evaluated_leaves += evaluated_count
        self.num_branch_leaves += len(nodes.nodes) - evaluated_count
        return evaluated_count

    def on_round(self, record: RoundRecord) -> None:
        """Counts one round."""
        self.rounds += 1
        self.output_tokens += record.kept_count
        self.step_sessions += record.step_sessions
        self.active_sessions += record.active_sessions
        self.cached_prompt_tokens += record.cached_prompt_tokens
        self.evictions += record.evictions
        self.draft_wait_s += record.wait_s
        self.target_queue_s += record.queue_s
        self.target_forward_s += record.forward_s
        self.target_evidence_s += record.evidence_s
        self.target_link_s += max(0.0, record.round_trip_s - record.queue_s - record.step_s)
        if self.rounds == 1:
            self.began_s = record.start_s
            self.time_to_first_token_s = record.round_s
        self.total_s = record.end_s - self.began_s
        self.num_rounds_off += not record.is_speculating
        if record.was_looked_up and record.next_kind is TokenKind.CORRECTION:
            self.num_correction_lookups += 1
            self.num_correction_hits += record.is_hit
        elif record.was_looked_up:
            self.num_bonus_lookups += 1
            self.num_bonus_hits += record.is_hit
        if self.follows_branch_hit:
            self.num_branch_tokens_accepted += record.accepted_count
        self.follows_branch_hit = record.is_branch_hit
        if record.offered_count:
            self.num_spec_steps += 1
            self.num_draft_tokens += record.offered_count
            self.num_accepted_draft_tokens += record.accepted_count
            missing = record.accepted_count + 1 - len(self.acceptance_histogram)
            self.acceptance_histogram.extend([0] * missing)
            self.acceptance_histogram[record.accepted_count] += 1

    def count_rate(self) -> None:
        """Works out the observed rate of a stream, from its first token on."""
        seconds = self.total_s - self.time_to_first_token_s
        self.observed_tokens_per_s = (self.output_tokens - 1) / seconds if seconds > 0 else 0.0

    def add(self, other: Statistics) -> None:
        """Adds what adds up of another stream's."""
        for name in SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        both = zip_longest(self.acceptance_histogram, list(other.acceptance_histogram), fillvalue=0)
        self.acceptance_histogram = list(map(sum, both))

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / speculating rounds; 1 when there were none."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / draft tokens; 0 when there were none."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


SUMMED = tuple(own.name for own in fields(Statistics) if own.metadata)
TRACED = tuple(own.name for own in fields(Statistics) if own.metadata.get("is_traced"))
SERIES = tuple((own.name, own.metadata["series"]) for own in fields(Statistics) if own.metadata.get("series"))


@dataclass(frozen=True, slots=True)
class Finished:
    """The text ended."""

    reason: FinishReason
    stop_string: str
    stop_token_id: int | None
    prompt_tokens: int
    output_tokens: int
    statistics: Statistics
    trace_id: str


Event = Started | Delta | Finished
