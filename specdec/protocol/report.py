"""What a generation tells its user: that it started, its tokens, how it ended and how it went."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.protocol.items import EvidenceAnswer, Nodes
from specdec.protocol.types import FinishReason, PositionLogprobs, Rule, TokenKind


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted; `seed` and `rule` are those in force, `rule_reason` says why."""

    request_id: str
    seed: int
    rule: Rule
    prompt_length: int
    max_tokens: int
    rule_reason: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
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


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a verdict came to: `next_kind` is that of its correction or bonus token.

    `was_looked_up`: the draft tree had a child for the next token's place. `was_found`: the next token was that child
    or another of them. `in_hand_count`: draft tokens in hand for the next round at once, without a round trip.
    """

    offered_count: int
    accepted_count: int
    next_kind: TokenKind
    was_looked_up: bool
    was_found: bool
    in_hand_count: int

    @property
    def is_hit(self) -> bool:
        """Whether the next round starts with draft tokens below a next token that was foreseen."""
        return self.was_found and self.in_hand_count > 0

    @property
    def is_branch_hit(self) -> bool:
        """Whether that next token was a correction: a branch child came true."""
        return self.is_hit and self.next_kind is TokenKind.CORRECTION


@dataclass(slots=True)
class Statistics:
    """How speculation went in one stream, counted round by round. Times in seconds, summed over rounds."""

    rounds: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    draft_link_bytes: int = 0
    target_link_bytes: int = 0
    draft_waits_expired: int = 0
    num_evaluated_leaves: int = 0
    num_branch_leaves: int = 0
    num_correction_lookups: int = 0
    num_correction_hits: int = 0
    num_bonus_lookups: int = 0
    num_bonus_hits: int = 0
    num_branch_tokens_accepted: int = 0
    num_rounds_off: int = 0
    predicted_tokens_per_s: float = 0.0
    observed_tokens_per_s: float = 0.0
    policy_reason: str = ""
    rule: Rule | None = None
    rule_reason: str = ""
    num_rounds_trial: int = 0
    trial_loss_s: float = 0.0
    step_sessions: int = 0
    active_sessions: int = 0
    cached_prompt_tokens: int = 0
    evictions: int = 0
    time_to_first_token_s: float = 0.0
    total_s: float = 0.0
    draft_wait_s: float = 0.0
    target_queue_s: float = 0.0
    target_forward_s: float = 0.0
    target_evidence_s: float = 0.0
    target_link_s: float = 0.0

    def count_nodes(self, nodes: Nodes) -> None:
        """Counts what one draft step sent: every evaluated place brings one proposal child."""
        evaluated_count = sum(node.proposal for node in nodes.nodes)
        self.num_evaluated_leaves += evaluated_count
        self.num_branch_leaves += len(nodes.nodes) - evaluated_count

    def count_round(self, outcome: RoundOutcome, follows_branch_hit: bool) -> None:
        """Counts one verdict. `follows_branch_hit`: the verdict before was a correction that was found in the tree."""
        self.rounds += 1
        draft_length, accepted_count = outcome.offered_count, outcome.accepted_count
        if outcome.was_looked_up and outcome.next_kind is TokenKind.CORRECTION:
            self.num_correction_lookups += 1
            self.num_correction_hits += outcome.is_hit
        elif outcome.was_looked_up:
            self.num_bonus_lookups += 1
            self.num_bonus_hits += outcome.is_hit
        if follows_branch_hit:
            self.num_branch_tokens_accepted += accepted_count
        if draft_length == 0:
            return
        self.num_spec_steps += 1
        self.num_draft_tokens += draft_length
        self.num_accepted_draft_tokens += accepted_count
        missing = accepted_count + 1 - len(self.acceptance_histogram)
        self.acceptance_histogram.extend([0] * missing)
        self.acceptance_histogram[accepted_count] += 1

    def count_answer(self, answer: EvidenceAnswer, round_trip_s: float) -> None:
        """Counts what the target said beside its evidence, `round_trip_s` after it was asked."""
        self.step_sessions += answer.step_sessions
        self.active_sessions += answer.active_sessions
        self.cached_prompt_tokens += answer.cached_prompt_tokens
        self.evictions += answer.evictions
        at_target_s = (answer.queue_us + answer.forward_us + answer.evidence_us) / 1e6
        self.target_queue_s += answer.queue_us / 1e6
        self.target_forward_s += answer.forward_us / 1e6
        self.target_evidence_s += answer.evidence_us / 1e6
        self.target_link_s += max(0.0, round_trip_s - at_target_s)

    def count_rate(self, output_count: int) -> None:
        """Works out the observed rate of a stream of so many output tokens, from the first of them on."""
        seconds = self.total_s - self.time_to_first_token_s
        self.observed_tokens_per_s = (output_count - 1) / seconds if seconds > 0 else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / speculating rounds; 1 when there were none."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / draft tokens; 0 when there were none."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


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
