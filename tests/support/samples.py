"""One measured generation: the parts of its time, its speculation statistics, and a digest of its text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from specdec.client.run import Run
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.variants import Variant, request_of

TIMEOUT_S = 600.0
CYCLE_REPEATS, CYCLE_TOKENS_MIN = 3, 12


@dataclass(frozen=True, slots=True)
class Sample:
    """One generation. Times of a round are means in milliseconds; counts are as in Statistics on the wire.

    `tokens_per_s` is by the coordinator's clock, after the first token. `text_digest` is of the token ids. `is_cyclic`:
    the text ends in a cycle, which is easy to guess.
    """

    rule: str
    rtt_ms: float
    variant: str
    prompt_id: int
    tokens_per_s: float
    first_token_ms: float
    output_tokens: int
    rounds: int
    spec_steps: int
    draft_tokens: int
    accepted_tokens: int
    acceptance_histogram: tuple[int, ...]
    forward_ms: float
    sampling_ms: float
    queue_ms: float
    link_ms: float
    wait_ms: float
    draft_bytes: int
    target_bytes: int
    evaluated_nodes: int
    branch_nodes: int
    lookups: int
    hits: int
    branch_tokens: int
    rounds_off: int
    predicted_tokens_per_s: float
    policy_reason: str
    text_digest: str
    is_cyclic: bool

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def ends_in_cycle(token_ids: Sequence[int]) -> bool:
    """Whether the last tokens repeat with some period: at least three times, and over a sixth of a long text."""
    length = len(token_ids)
    for period in range(1, length // CYCLE_REPEATS + 1):
        count = max(CYCLE_REPEATS * period, CYCLE_TOKENS_MIN, length // 6)
        if count <= length and all(
            token_ids[i] == token_ids[i - period] for i in range(length - count + period, length)
        ):
            return True
    return False


def measure(
    stub: pb_grpc.CoordinatorServiceStub,
    variant: Variant,
    rule: str,
    rtt_ms: float,
    prompt: tuple[int, str],
    max_tokens: int,
) -> Sample:
    """Runs one generation. Raises grpc.RpcError."""
    run = Run.of(stub.Generate(request_of(variant, rule, prompt[1], max_tokens), timeout=TIMEOUT_S))
    return sample_of(run, variant.name, rule, rtt_ms, prompt[0])


def sample_of(run: Run, variant: str, rule: str, rtt_ms: float, prompt_id: int) -> Sample:
    """Returns the sample of an ended generation."""
    counts, time, token_ids = run.statistics, run.statistics.time, run.token_ids
    seconds = time.total_s - time.time_to_first_token_s
    per_round_ms = 1e3 / max(1, counts.rounds)
    return Sample(
        rule=rule,
        rtt_ms=rtt_ms,
        variant=variant,
        prompt_id=prompt_id,
        tokens_per_s=(len(token_ids) - 1) / seconds if seconds > 0 else 0.0,
        first_token_ms=time.time_to_first_token_s * 1e3,
        output_tokens=len(token_ids),
        rounds=counts.rounds,
        spec_steps=counts.num_spec_steps,
        draft_tokens=counts.num_draft_tokens,
        accepted_tokens=counts.num_accepted_draft_tokens,
        acceptance_histogram=tuple(counts.acceptance_histogram),
        forward_ms=time.target_forward_s * per_round_ms,
        sampling_ms=time.target_sampling_s * per_round_ms,
        queue_ms=time.target_queue_s * per_round_ms,
        link_ms=time.target_link_s * per_round_ms,
        wait_ms=time.draft_wait_s * per_round_ms,
        draft_bytes=counts.draft_link_bytes,
        target_bytes=counts.target_link_bytes,
        evaluated_nodes=counts.num_evaluated_nodes,
        branch_nodes=counts.num_branch_nodes,
        lookups=counts.num_recovered_lookups + counts.num_bonus_lookups,
        hits=counts.num_recovered_hits + counts.num_bonus_hits,
        branch_tokens=counts.num_branch_tokens_accepted,
        rounds_off=counts.num_rounds_off,
        predicted_tokens_per_s=counts.predicted_tokens_per_s,
        policy_reason=counts.policy_reason,
        text_digest=hashlib.sha256(repr(token_ids).encode()).hexdigest()[:16],
        is_cyclic=ends_in_cycle(token_ids),
    )
