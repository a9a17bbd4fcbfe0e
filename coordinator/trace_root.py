"""What the root span of a generation says: the request, how it ended, and its totals, by the names people know.

`gen_ai.*` as OpenTelemetry spells them, ours under `specdec.*`. Never prompts, texts, token ids, stop strings, labels.
"""

from __future__ import annotations

import grpc

from specdec.errors import SpecdecError
from specdec.protocol.report import Finished, Started, Statistics
from specdec.protocol.request import Ask
from specdec.protocol.types import Description
from specdec.rpc.status import code_of
from specdec.telemetry.spans import AttributeValue

# Codes that are this side's failure and no refusal, as OpenTelemetry draws the line for servers.
FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
OPERATION = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "specdec"}
COUNTS = (
    "rounds",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "num_evaluated_leaves",
    "num_correction_hits",
    "num_rounds_off",
    "draft_waits_expired",
    "draft_link_bytes",
    "target_link_bytes",
    "cached_prompt_tokens",
    "evictions",
)


def request_attributes(ask: Ask, started: Started, target: Description) -> dict[str, AttributeValue]:
    """What was asked and is in force."""
    sampling = ask.sampling
    said: dict[str, AttributeValue] = {
        "gen_ai.request.model": target.model_name,
        "gen_ai.request.max_tokens": started.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "specdec.request_id": started.request_id,
        "specdec.rule": started.rule.name,
        "specdec.speculative": ask.speculative.enabled,
        "specdec.resumed_tokens": len(ask.resumed_token_ids),
    }
    if sampling.seed is not None:
        said["gen_ai.request.seed"] = str(sampling.seed)  # an unsigned 64-bit number: OTLP's integers are signed
    return said


def finish_attributes(finished: Finished) -> dict[str, AttributeValue]:
    """How the text ended, and its statistics."""
    statistics = finished.statistics
    return {
        "gen_ai.response.finish_reasons": (finished.reason.name.lower(),),
        "gen_ai.usage.input_tokens": finished.prompt_tokens,
        "gen_ai.usage.output_tokens": finished.output_tokens,
        **{f"specdec.{name}": getattr(statistics, name) for name in COUNTS},
        **rates(statistics),
    }


def rates(statistics: Statistics) -> dict[str, AttributeValue]:
    """Quotients that people ask for first."""
    return {
        "specdec.mean_acceptance_length": round(statistics.mean_acceptance_length, 4),
        "specdec.draft_acceptance_rate": round(statistics.draft_acceptance_rate, 4),
        "specdec.time_to_first_token_ms": round(1000 * statistics.time_to_first_token_s, 3),
        "specdec.predicted_tokens_per_s": round(statistics.predicted_tokens_per_s, 3),
        "specdec.observed_tokens_per_s": round(statistics.observed_tokens_per_s, 3),
        "specdec.policy_reason": statistics.policy_reason,
    }


def failure_attributes(error: SpecdecError) -> dict[str, AttributeValue]:
    """Why there is no text, in one word and one code; the sentence may quote what the user sent."""
    return {"error.type": error.reason, "rpc.grpc.status_code": code_of(error).value[0]}


def is_fault(error: SpecdecError) -> bool:
    """Whether an error makes the span a failed one; a refusal of what was asked does not."""
    return code_of(error) in FAULTS
