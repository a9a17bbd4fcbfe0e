"""What spans of a generation say of the request and of the hops to other machines, by the names people know.

`gen_ai.*` as OpenTelemetry spells them, ours under `specdec.*`. Never prompts, texts, token ids, stop strings, labels.
A draft message in detail is one span, from the draft's step to its arrival, with what became of its tokens. When a step
began is known by the draft's clock only: the span starts at the earliest moment it can have been by ours, so it never
starts after the draft's own span of the step, whatever the link does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from coordinator.trace_rounds import Phase, parts_of
from specdec.errors import SpecdecError
from specdec.protocol.items import Nodes, Trace
from specdec.protocol.report import TRACED, Finished, Started, Statistics
from specdec.protocol.request import Ask
from specdec.protocol.round_record import RoundRecord
from specdec.protocol.session import Session
from specdec.protocol.tree import Place
from specdec.protocol.types import Description
from specdec.rpc.stamps import Stamps
from specdec.rpc.status import code_of
from specdec.telemetry.spans import AttributeValue, Span, SpanKind, SpanLink, draft_span_id

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
MESSAGE_COUNT_MAX = 32  # messages whose tokens a round may still offer
READING_S = 0.0001  # clocks are read and told to the microsecond; wall time is compared by a few readings


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
        **{f"specdec.{name}": getattr(statistics, name) for name in TRACED},
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


def link_attributes(stamps: Stamps) -> dict[str, AttributeValue]:
    """What the stamps of a link tell: network time of its last exchange, and how the clocks stand."""
    said: dict[str, AttributeValue] = {}
    if stamps.network_s is not None:
        said["specdec.network_ms"] = round(1000 * stamps.network_s, 4)
    if (offset_s := stamps.clock_offset_s) is not None:
        said["specdec.clock_offset_ms"] = round(1000 * offset_s, 4)
    return said


def hop_attributes(record: RoundRecord, stamps: Stamps) -> dict[str, AttributeValue]:
    """The hop of one verification, in milliseconds: the round trip is the stay at the target, the network by the stamps
    of the messages, and the rest, which both processes took to hand the messages on."""
    away_s = parts_of(record)[1]
    network_s = away_s if stamps.network_s is None else min(away_s, stamps.network_s)
    return {
        **link_attributes(stamps),
        "specdec.round": record.round_index,
        "specdec.offered": record.offered_count,
        "specdec.round_trip_ms": round(1000 * record.round_trip_s, 4),
        "specdec.server_ms": round(1000 * (record.round_trip_s - away_s), 4),
        "specdec.network_ms": round(1000 * network_s, 4),
        "specdec.handling_ms": round(1000 * (away_s - network_s), 4),
    }


@dataclass(frozen=True, slots=True, eq=False)
class DraftMessage:
    """One message in detail: its span, when it came, and where its tokens stand in the tree."""

    span_id: bytes
    arrived_s: float
    places: tuple[Place, ...]


class DraftMessages:
    """The messages of one generation that are recorded in detail, and which of them the round in flight lives on."""

    def __init__(self) -> None:
        self._recent: deque[DraftMessage] = deque(maxlen=MESSAGE_COUNT_MAX)
        self._offered: list[tuple[DraftMessage, list[int]]] = []
        self._offered_s = 0.0

    def message(self, session: Session, nodes: Nodes, stamps: Stamps, root: Trace, phases: Sequence[Phase]) -> Span:
        """The span of a message that has just come; it hangs on the phase its step began in."""
        arrived_s = time.monotonic()
        places = [session.tree.named.get((nodes.epoch, node.node)) for node in nodes.nodes]
        usable = tuple(place for place in places if place is not None and place.alive)
        span_id = draft_span_id(root.span_id, nodes)
        self._recent.append(DraftMessage(span_id, arrived_s, usable))
        earliest_ns = stamps.earliest_own_ns(nodes.step_began_us)
        start_s = arrived_s - nodes.step_us / 1e6 if earliest_ns is None else earliest_ns / 1e9
        start_s = max(start_s - READING_S, phases[0].start_s)
        phase = next((own for own in reversed(phases) if own.start_s <= start_s), phases[0])
        attributes: dict[str, AttributeValue] = {
            "specdec.draft_tokens": len(nodes.nodes),
            "specdec.branch_tokens": sum(not node.proposal for node in nodes.nodes),
            "specdec.tokens_too_late": len(nodes.nodes) - len(usable),
            "specdec.step_rows": nodes.step_rows,
            "specdec.server_ms": nodes.step_us / 1000,
            **link_attributes(stamps),
        }
        ids = (root.trace_id, span_id, phase.span_id)
        return Span("draft", *ids, start_s, arrived_s, SpanKind.CLIENT, attributes)

    def offer(self, path: Sequence[Place], now_s: float) -> None:
        """These places are offered by the round that is sent now."""
        self._offered_s = now_s
        self._offered = []
        for message in self._recent:
            indices = [index for index, place in enumerate(path) if place in message.places]
            if indices:
                self._offered.append((message, indices))

    def links(self, accepted_count: int, trace_id: bytes) -> tuple[SpanLink, ...]:
        """Links of the round that ended to the messages whose tokens it offered, with the tokens' fate."""
        offered, self._offered = self._offered, []
        return tuple(
            SpanLink(
                trace_id,
                message.span_id,
                {
                    "specdec.arrival_lead_ms": round(1000 * (self._offered_s - message.arrived_s), 4),
                    "specdec.offered": len(indices),
                    "specdec.accepted": sum(index < accepted_count for index in indices),
                },
            )
            for message, indices in offered
        )
