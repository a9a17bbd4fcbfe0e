"""What a generation tells its user: that it started, its tokens, how it ended and how it went."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.protocol.types import FinishReason, PositionLogprobs, Rule, TokenKind


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted; `seed` and `rule` are those in force."""

    request_id: str
    seed: int
    rule: Rule
    prompt_length: int
    max_tokens: int


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
    time_to_first_token_s: float = 0.0
    total_s: float = 0.0
    draft_wait_s: float = 0.0
    target_queue_s: float = 0.0
    target_forward_s: float = 0.0
    target_evidence_s: float = 0.0
    target_link_s: float = 0.0

    def count_round(self, draft_length: int, accepted_count: int) -> None:
        """Counts one verdict."""
        self.rounds += 1
        if draft_length == 0:
            return
        self.num_spec_steps += 1
        self.num_draft_tokens += draft_length
        self.num_accepted_draft_tokens += accepted_count
        missing = accepted_count + 1 - len(self.acceptance_histogram)
        self.acceptance_histogram.extend([0] * missing)
        self.acceptance_histogram[accepted_count] += 1

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
