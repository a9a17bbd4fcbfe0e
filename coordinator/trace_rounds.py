"""Rounds and draft messages in a trace: which are recorded in detail, what each says, and what holds many rounds.

A round in detail is up to five spans in two services, and the draft's messages around it two spans each: the first
rounds, and then a sample. All others are events of the prefill or of a segment of 32 rounds, so that 2,000 rounds stay
below 300 spans. Records are kept, and become events only when the span is sent, by the thread that sends it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.protocol.items import Nodes
from specdec.protocol.report import RoundRecord
from specdec.protocol.session import Session
from specdec.protocol.tree import Place
from specdec.protocol.types import TokenKind
from specdec.rpc.stamps import Stamps
from specdec.telemetry.spans import SPAN_ID_BYTES, AttributeValue, SpanEvent, SpanLink, draft_span_id

SEGMENT_ROUND_COUNT = 32
FIRST_ROUND_COUNT = 4  # round 0, which reads the prompt, and the three after it
FIRST_SEGMENTS = (1, 2, 4)
SEGMENT_INTERVAL = 8
ROUND_IN_SEGMENT = 16  # in the middle, so that the draft's work for it belongs to the same segment
DRAFT_ROUNDS_BEFORE = 2  # with a window of some rounds, what a round offers was drafted in those before it
SLOW_ROUND_COUNT_MAX = 8  # rounds recorded because they were slow, by this process alone
SLOW_FACTOR = 2.0  # of a segment's mean, above which its slowest round is recorded on its own
NOTE_COUNT_MAX = 64  # of one phase: a link that comes and goes all the time is told of by its first changes
MESSAGE_COUNT_MAX = 32  # messages whose tokens a round may still offer
READING_S = 0.0001  # clocks are read and told to the microsecond; wall time is compared by a few readings
PARTS = ("wait", "network", "queue", "forward", "evidence", "rule")


def segment_of(round_index: int) -> int:
    """The segment a round belongs to, from 0; -1 is round 0, which is the prefill."""
    return (round_index - 1) // SEGMENT_ROUND_COUNT


def is_round_detailed(round_index: int) -> bool:
    """Whether a round's verification is recorded in detail, by the target too."""
    segment = segment_of(round_index)
    if round_index < FIRST_ROUND_COUNT:
        return True
    is_sampled = segment in FIRST_SEGMENTS or (segment > 0 and segment % SEGMENT_INTERVAL == 0)
    return is_sampled and round_index == 1 + segment * SEGMENT_ROUND_COUNT + ROUND_IN_SEGMENT


def is_drafting_detailed(round_index: int) -> bool:
    """Whether the first draft steps after the commit that goes with a round are recorded in detail."""
    return any(is_round_detailed(round_index + later) for later in range(DRAFT_ROUNDS_BEFORE + 1))


def parts_of(record: RoundRecord) -> tuple[float, ...]:
    """Where a round's time went, by PARTS; they add up to it: held for draft tokens, network both ways, the target's
    queue, forward and evidence, and this process's own work.

    Network time is (t3 - t0) - (t2 - t1), the round trip by this clock less the stay at the target by its own, and so
    with what both processes take to hand the messages on.
    """
    server_s = min(record.round_trip_s, record.server_s or record.queue_s + record.step_s)
    queue_s = max(0.0, server_s - record.step_s)
    rule_s = max(0.0, record.round_s - record.wait_s - record.round_trip_s)
    return record.wait_s, record.round_trip_s - server_s, queue_s, record.forward_s, record.evidence_s, rule_s


def branch_of(record: RoundRecord) -> str:
    """Whether a correction was among the branch children, "hit" or "missed"; "" where none was guessed."""
    if record.next_kind is TokenKind.BONUS or not record.was_looked_up:
        return ""
    return "hit" if record.was_found else "missed"


def milliseconds(parts: tuple[float, ...]) -> dict[str, AttributeValue]:
    """Times by PARTS as attributes."""
    return {f"specdec.{name}_ms": round(1000 * value, 4) for name, value in zip(PARTS, parts)}


def round_attributes(record: RoundRecord) -> dict[str, AttributeValue]:
    """What a round's event, and its span if it has one, say."""
    said: dict[str, AttributeValue] = {
        "specdec.round": record.round_index,
        "specdec.offered": record.offered_count,
        "specdec.accepted": record.accepted_count,
        "specdec.next": record.next_kind.name.lower(),
        **milliseconds(parts_of(record)),
    }
    if record.discarded_count:
        said["specdec.discarded"] = record.discarded_count
    if branch := branch_of(record):
        said["specdec.branch"] = branch
    return said


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


def wasted_events(record: RoundRecord) -> tuple[SpanEvent, ...]:
    """Work that came to nothing in a round, as events of its own span."""
    events = []
    if record.discarded_count:
        discarded = {"specdec.discarded": record.discarded_count}
        events.append(SpanEvent("draft tokens discarded", record.end_s, discarded))
    if branch_of(record) == "missed":
        events.append(SpanEvent("branch missed", record.end_s))
    return tuple(events)


@dataclass(slots=True, eq=False)
class Phase:
    """The prefill or one segment, while its rounds go by. Read as events once it is over."""

    name: str
    start_s: float
    span_id: bytes = field(default_factory=lambda: os.urandom(SPAN_ID_BYTES))
    draft_message_count: int = 0
    records: list[RoundRecord] = field(default_factory=list)
    _notes: list[SpanEvent] = field(default_factory=list)
    _note_count: int = 0

    def note(self, event: SpanEvent) -> None:
        """Something beside the rounds; beyond NOTE_COUNT_MAX only counted."""
        self._note_count += 1
        if len(self._notes) < NOTE_COUNT_MAX:
            self._notes.append(event)

    def slow_round(self) -> RoundRecord | None:
        """The slowest round, where it took far longer than the mean of all."""
        if not self.records:
            return None
        slowest = max(self.records, key=lambda record: record.round_s)
        mean_s = sum(record.round_s for record in self.records) / len(self.records)
        return slowest if slowest.round_s > SLOW_FACTOR * mean_s else None

    def __iter__(self) -> Iterator[SpanEvent]:
        """Its events in order of time: one a round, at the verdict, and the notes."""
        rounds = [SpanEvent("round", record.end_s, round_attributes(record)) for record in self.records]
        return iter(sorted([*rounds, *self._notes], key=lambda event: event.time_s))

    def parts(self) -> tuple[float, ...]:
        """Sums of the rounds' times, by PARTS."""
        return tuple(map(sum, zip(*map(parts_of, self.records)))) if self.records else (0.0,) * len(PARTS)

    def attributes(self) -> dict[str, AttributeValue]:
        """Totals over its rounds."""
        branches = list(map(branch_of, self.records))
        accepted_count = sum(record.accepted_count for record in self.records)
        said: dict[str, AttributeValue] = {
            "specdec.rounds": len(self.records),
            "specdec.offered": sum(record.offered_count for record in self.records),
            "specdec.accepted": accepted_count,
            "specdec.tokens": accepted_count + len(self.records),
            "specdec.discarded": sum(record.discarded_count for record in self.records),
            "specdec.branches_hit": branches.count("hit"),
            "specdec.branches_missed": branches.count("missed"),
            "specdec.draft_messages": self.draft_message_count,
            **milliseconds(self.parts()),
        }
        if self.records:
            said["specdec.first_round"] = self.records[0].round_index
        if self._note_count > len(self._notes):
            said["specdec.events_dropped"] = self._note_count - len(self._notes)
        return said


class DraftMessage(NamedTuple):
    """One message in detail: its span, when it came, and where its tokens stand in the tree."""

    span_id: bytes
    arrived_s: float
    places: tuple[Place, ...]


class DraftMessages:
    """The messages of one generation that are recorded in detail, and which of them the round in flight lives on.

    A message is one span, from the draft's step to its arrival. When a step began is known by the draft's clock only:
    the span starts at the earliest moment it can have been by ours, so it never starts after the draft's own span of
    the step, whatever the link does.
    """

    def __init__(self) -> None:
        self._recent: deque[DraftMessage] = deque(maxlen=MESSAGE_COUNT_MAX)
        self._offered: list[tuple[DraftMessage, list[int]]] = []
        self._offered_s = 0.0

    def message(
        self, session: Session, nodes: Nodes, stamps: Stamps, root_id: bytes, phases: Sequence[Phase]
    ) -> tuple[bytes, bytes, float, float, dict[str, AttributeValue]]:
        """The span of a message that has just come: its id, its parent's (the phase in which the draft's step began),
        beginning, end and attributes."""
        arrived_s = time.monotonic()
        places = [session.tree.named.get((nodes.epoch, node.node)) for node in nodes.nodes]
        usable = tuple(place for place in places if place is not None and place.alive)
        span_id = draft_span_id(root_id, nodes)
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
        return span_id, phase.span_id, start_s, arrived_s, attributes

    def offer(self, path: Sequence[Place], now_s: float) -> None:
        """These places are offered by the round that is sent now."""
        by_message = [(own, [at for at, place in enumerate(path) if place in own.places]) for own in self._recent]
        self._offered_s, self._offered = now_s, [(own, indices) for own, indices in by_message if indices]

    def links(self, accepted_count: int, trace_id: bytes) -> Iterator[SpanLink]:
        """Links of the round that ended to the messages whose tokens it offered, with the tokens' fate."""
        offered, self._offered = self._offered, []
        for message, indices in offered:
            attributes: dict[str, AttributeValue] = {
                "specdec.arrival_lead_ms": round(1000 * (self._offered_s - message.arrived_s), 4),
                "specdec.offered": len(indices),
                "specdec.accepted": sum(index < accepted_count for index in indices),
            }
            yield SpanLink(trace_id, message.span_id, attributes)
