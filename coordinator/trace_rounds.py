"""Rounds and draft messages in a trace: the choice of detailed ones, their attributes, and the round groups.

A detailed round is up to seven spans in two services, and the draft steps before it one each: the prefill, then the
first round of some groups. All others are events of their group and, summed, one span for each part of their time
(`sums`), laid end to end behind the detailed round: the spans of a group cover its time once, so views that add up
spans give the shares of the statistics. Spans are a function of records and notes alone. Records become events only
when the span is sent, by the thread that sends it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from specdec.protocol.items import Nodes
from specdec.protocol.records import RoundRecord
from specdec.protocol.types import Proposer, TokenKind
from specdec.rpc.stamps import Stamps
from specdec.telemetry.spans import (
    AttributeValue,
    Span,
    SpanEvent,
    SpanKind,
    SpanLink,
    derived_span_id,
    draft_span_id,
    drawn_span_id,
)

GROUP_ROUND_COUNT = 32
SHORT_GROUP_COUNT = 10  # the groups after these have twice the rounds
LONG_GROUPS_BEGIN = 1 + SHORT_GROUP_COUNT * GROUP_ROUND_COUNT
ROUND_GROUP = "round group"
DETAILED_GROUPS = (1, 2, 4)  # and every eighth: their first round is in detail
GROUP_INTERVAL = 8
DRAFT_ROUNDS_BEFORE = 2  # with a window of some rounds, a round's draft tokens come from the rounds before it
SLOW_ROUND_COUNT_MAX = 8  # events of slow rounds in one trace
SLOW_FACTOR = 3.0  # times the group's mean, above which its slowest round has an event
SUM_SHARE_MIN = 0.001  # of the summed rounds: smaller parts have no span
ARRIVAL_COUNT_MAX = 16  # events of draft tokens in one group; a draft decides how many it marks
NOTE_COUNT_MAX = 64  # of one group: of an unstable link the first changes are recorded
DRAFT_ARRIVED = "draft tokens arrived"
KEPT_ROUND_COUNT = 4096  # of the choices by round index, which every request asks for again
PARTS = ("wait", "network", "queue", "forward", "sampling", "rule")
TARGET_PARTS = ("queue", "forward", "sampling")
Parts: TypeAlias = tuple[float, ...]  # seconds, by PARTS
NO_PARTS: Parts = (0.0,) * len(PARTS)
Attributes: TypeAlias = dict[str, AttributeValue]


def round_group_of(round_index: int) -> int:
    """The index of the group a round belongs to: 0 for the prefill, which is round 0."""
    if round_index < LONG_GROUPS_BEGIN:
        return -(-round_index // GROUP_ROUND_COUNT)
    return 1 + SHORT_GROUP_COUNT + (round_index - LONG_GROUPS_BEGIN) // (2 * GROUP_ROUND_COUNT)


@functools.lru_cache(KEPT_ROUND_COUNT)
def begins_group(round_index: int) -> bool:
    """Whether a round is the first of its group."""
    return round_index == 0 or round_group_of(round_index) != round_group_of(round_index - 1)


@functools.lru_cache(KEPT_ROUND_COUNT)
def is_round_detailed(round_index: int) -> bool:
    """Whether a round's verification is recorded in detail, by the target too."""
    group = round_group_of(round_index)
    return (group in DETAILED_GROUPS or group % GROUP_INTERVAL == 0) and begins_group(round_index)


@functools.lru_cache(KEPT_ROUND_COUNT)
def is_drafting_detailed(round_index: int) -> bool:
    """Whether the first draft steps after the commit before a round are recorded in detail."""
    return any(is_round_detailed(round_index + later) for later in range(DRAFT_ROUNDS_BEFORE + 1))


def parts_of(record: RoundRecord) -> Parts:
    """The parts of a round's time, by PARTS; their sum is the round's time: wait for draft tokens, network both ways,
    the target's queue, forward pass and sampler, and this process's own work.

    Network time is (t3 - t0) - (t2 - t1), the round trip by this clock less the time at the target by its own clock; it
    includes the handling of the messages by both processes.
    """
    server_s = record.server_share_s
    forward_s = min(record.step.forward_s, server_s)  # whatever the target says
    sampling_s = min(record.step.sampling_s, server_s - forward_s)
    times = record.times
    rule_s = max(0.0, times.round_s - times.wait_s - times.round_trip_s)
    return times.wait_s, times.round_trip_s - server_s, record.server_wait_s, forward_s, sampling_s, rule_s


def branch_of(record: RoundRecord) -> str:
    """Whether the recovered token was among the branch children, "hit" or "missed"; "" where there was no guess."""
    if record.tokens.next_kind is TokenKind.BONUS or not record.tree.was_looked_up:
        return ""
    return "hit" if record.tree.was_found else "missed"


def total(parts: Iterable[Parts]) -> Parts:
    """Returns the sums of times by PARTS."""
    return tuple(map(sum, zip(NO_PARTS, *parts)))


def milliseconds(parts: Parts) -> Attributes:
    """Returns times by PARTS as attributes in milliseconds."""
    return {f"specdec.{name}_ms": round(1000 * value, 4) for name, value in zip(PARTS, parts)}


def proposed(*records: RoundRecord) -> Attributes:
    """Returns the accepted and offered tokens of rounds by proposer, in words; nothing if only the draft model
    proposed."""
    offered = [proposer for record in records for proposer in record.tokens.proposers]
    if offered.count(Proposer.DRAFT) == len(offered):
        return {}
    accepted = [proposer for record in records for proposer in record.tokens.accepted_proposers]
    counts = (f"{own.name.lower()} {accepted.count(own)}/{offered.count(own)}" for own in sorted(set(offered)))
    return {"specdec.proposed": ", ".join(counts)}


def round_attributes(record: RoundRecord) -> Attributes:
    """Returns the attributes of a round's event, and of its span if it has one, without the parts of its time."""
    branch, discarded_count = branch_of(record), record.tree.discarded_count
    return {
        "specdec.round": record.round_index,
        "specdec.offered": record.tokens.offered_count,
        "specdec.accepted": record.tokens.accepted_count,
        "specdec.next": record.tokens.next_kind.name.lower(),
        **({"specdec.discarded": discarded_count} if discarded_count else {}),
        **proposed(record),
        **({"specdec.branch": branch} if branch else {}),
    }


def round_event(record: RoundRecord, parts: Parts) -> SpanEvent:
    """Returns the event of a round. The parts of its time are one attribute in words: six would cost as much to send as
    all the rest."""
    in_words = ", ".join(f"{name} {1000 * part_s:.2f}" for name, part_s in zip(PARTS, parts) if part_s)
    return SpanEvent("round", record.times.end_s, {**round_attributes(record), "specdec.parts_ms": in_words})


def link_attributes(stamps: Stamps) -> Attributes:
    """Returns the attributes from a link's stamps: network time of its last exchange, and the clock offset."""
    times_s = {"network": stamps.network_s, "clock_offset": stamps.clock_offset_s}
    return {f"specdec.{name}_ms": round(1000 * time_s, 4) for name, time_s in times_s.items() if time_s is not None}


def hop_attributes(record: RoundRecord, stamps: Stamps) -> Attributes:
    """Returns the hop of one verification, in milliseconds: the round trip is the time at the target, the network time
    by the messages' stamps, and the rest, the handling of the messages by both processes."""
    away_s = parts_of(record)[1]
    network_s = away_s if stamps.network_s is None else min(away_s, stamps.network_s)
    return {
        **link_attributes(stamps),
        "specdec.round": record.round_index,
        "specdec.offered": record.tokens.offered_count,
        "specdec.round_trip_ms": round(1000 * record.times.round_trip_s, 4),
        "specdec.server_ms": round(1000 * (record.times.round_trip_s - away_s), 4),
        "specdec.network_ms": round(1000 * network_s, 4),
        "specdec.handling_ms": round(1000 * (away_s - network_s), 4),
    }


def wasted_events(record: RoundRecord) -> tuple[SpanEvent, ...]:
    """Returns a round's wasted work as events of its own span."""
    events = []
    if record.tree.discarded_count:
        discarded = {"specdec.discarded": record.tree.discarded_count}
        events.append(SpanEvent("draft tokens discarded", record.times.end_s, discarded))
    if branch_of(record) == "missed":
        events.append(SpanEvent("branch missed", record.times.end_s))
    return tuple(events)


class DraftMessage(NamedTuple):
    """A message of the draft in detail: its span, its arrival, the names of its tokens, and the time of its step."""

    span_id: bytes
    arrived_s: float
    names: frozenset[tuple[int, int]]
    step_us: int

    @classmethod
    def of(cls, nodes: Nodes, root_id: bytes, arrived_s: float) -> DraftMessage:
        """Returns the message with these nodes."""
        names = frozenset((nodes.epoch, node.node_id) for node in nodes.nodes)
        return cls(draft_span_id(root_id, nodes), arrived_s, names, nodes.step_us)


def arrival_event(nodes: Nodes, late_count: int, stamps: Stamps, arrived_s: float) -> SpanEvent:
    """Returns the event of a message in detail."""
    attributes: Attributes = {
        "specdec.draft_tokens": len(nodes.nodes),
        "specdec.branch_tokens": sum(not node.proposal for node in nodes.nodes),
        "specdec.tokens_too_late": late_count,
        "specdec.step_rows": nodes.step_rows,
        "specdec.step_ms": nodes.step_us / 1000,
        **link_attributes(stamps),
    }
    return SpanEvent(DRAFT_ARRIVED, arrived_s, attributes)


def links_of(record: RoundRecord, messages: Sequence[DraftMessage], trace_id: bytes) -> Iterator[SpanLink]:
    """Yields links from a round to the messages whose tokens it offered, with the number accepted."""
    brought = {name: message for message in messages for name in message.names}
    sources = [brought.get(name) if name is not None else None for name in record.tree.names]
    for message in messages:
        if message in sources:
            attributes: Attributes = {
                "specdec.arrival_lead_ms": round(1000 * (record.times.sent_s - message.arrived_s), 4),
                "specdec.offered": sources.count(message),
                "specdec.accepted": sum(sources[place] is message for place in record.tree.accepted),
            }
            yield SpanLink(trace_id, message.span_id, attributes)


def round_span_id(group_id: bytes, round_index: int) -> bytes:
    """Returns the id of a round's own span; empty where it has none. The prefill is its own round."""
    if not is_round_detailed(round_index):
        return b""
    return derived_span_id(group_id, "round") if round_index else group_id


@dataclass(slots=True, eq=False)
class RoundGroup:
    """The prefill or a round group, as its trace keeps it until it ends: the records of its rounds, the messages of the
    draft in detail, its own and those of the group before (`earlier`), and the events outside the rounds."""

    index: int
    start_s: float
    earlier: Sequence[DraftMessage] = ()
    span_id: bytes = field(default_factory=drawn_span_id)
    records: list[RoundRecord] = field(default_factory=list)
    messages: list[DraftMessage] = field(default_factory=list)
    message_count: int = 0  # of the draft, in detail or not
    drafting_us: int = 0  # of the draft's steps, by the draft; those with spans of their own among them
    notes: list[SpanEvent] = field(default_factory=list)  # the first NOTE_COUNT_MAX
    note_count: int = 0

    def note(self, event: SpanEvent) -> None:
        """Adds an event outside the rounds; beyond NOTE_COUNT_MAX it is only counted."""
        self.note_count += 1
        if len(self.notes) < NOTE_COUNT_MAX:
            self.notes.append(event)


def round_spans(record: RoundRecord, group: RoundGroup, trace_id: bytes, stamps: Stamps) -> Iterator[Span]:
    """Yields the spans of a round in detail, the newest of its group. `stamps`: of the link to the target."""
    span_id, times = round_span_id(group.span_id, record.round_index), record.times
    if times.wait_s:
        yield Span("wait", trace_id, drawn_span_id(), span_id, times.sent_s - times.wait_s, times.sent_s)
    own, end_s = (trace_id, derived_span_id(span_id, "verify"), span_id), times.sent_s + times.round_trip_s
    yield Span("verify", *own, times.sent_s, end_s, SpanKind.CLIENT, hop_attributes(record, stamps))
    if span_id != group.span_id:
        attributes = {**round_attributes(record), **milliseconds(parts_of(record))}
        links = tuple(links_of(record, (*group.earlier, *group.messages), trace_id))
        own, events = (trace_id, span_id, group.span_id), wasted_events(record)
        yield Span("round", *own, times.start_s, times.end_s, SpanKind.INTERNAL, attributes, events, links)


def unanswered_spans(
    group: RoundGroup, round_index: int, times_s: tuple[float, float, float], trace_id: bytes, error: str
) -> Iterator[Span]:
    """Yields the spans of a round whose verification, in flight at the end, is not answered. `times_s`: when the round
    began, when the verification was sent, and the end; `error`: of this side, or empty."""
    round_id, (start_s, sent_s, end_s) = round_span_id(group.span_id, round_index), times_s
    said: Attributes = {"specdec.unanswered": True, **({"error.type": error} if error else {})}
    own = trace_id, derived_span_id(round_id, "verify") if round_id else drawn_span_id(), round_id or group.span_id
    yield Span("verify", *own, sent_s, end_s, SpanKind.CLIENT, said, error=error)
    if round_id not in (b"", group.span_id):
        yield Span("round", trace_id, round_id, group.span_id, start_s, end_s)


def slow_round_event(records: Sequence[RoundRecord]) -> SpanEvent | None:
    """Returns an event for the slowest round if it took more than SLOW_FACTOR times the mean of all, with the largest
    part of its time."""
    slowest = max(records, key=lambda record: record.times.round_s, default=None)
    mean_s = sum(record.times.round_s for record in records) / max(1, len(records))
    if slowest is None or slowest.times.round_s <= SLOW_FACTOR * mean_s:
        return None
    part_s, part = max(zip(parts_of(slowest), PARTS))
    said: Attributes = {
        "specdec.round": slowest.round_index,
        "specdec.round_ms": round(1000 * slowest.times.round_s, 1),
        "specdec.mean_ms": round(1000 * mean_s, 1),
        "specdec.part": part,
        "specdec.part_ms": round(1000 * part_s, 1),
    }
    return SpanEvent("slow round", slowest.times.end_s, said)


def sums(group: RoundGroup, parts: Sequence[Parts], drafting_s: float) -> Iterator[tuple[str, float, float, int]]:
    """Yields the summed parts of the rounds without spans of their own: name, start, end, number of rounds.

    The parts of the rounds lie end to end from the end of the detailed round, in the order of PARTS; the draft's steps
    run beside them, from the same start, and may end after the group: some began in the one before.
    """
    summed = [pair for pair in zip(group.records, parts) if not is_round_detailed(pair[0].round_index)]
    start_s = summed[0][0].times.start_s if summed else group.start_s
    if drafting_s > 0:
        yield "draft", start_s, start_s + drafting_s, len(group.records)
    spent = list(zip(PARTS, map(sum, zip(*(own for _, own in summed)))))
    for part, part_s in spent:
        if part_s > SUM_SHARE_MIN * sum(each_s for _, each_s in spent):
            yield part, start_s, start_s + part_s, len(summed)
            start_s += part_s


def group_name(group: RoundGroup) -> str:
    """Returns the name of a group's span. A round group says whether it speculated: plain without any draft token,
    mixed where the policy was off for a part."""
    if group.index == 0:
        return "prefill"
    if not group.records:
        return ROUND_GROUP
    if not any(record.tokens.offered_count for record in group.records):
        return f"{ROUND_GROUP}, plain"
    return f"{ROUND_GROUP}, {'speculative' if all(record.is_speculating for record in group.records) else 'mixed'}"


def group_events(group: RoundGroup, parts: Sequence[Parts]) -> Iterator[SpanEvent]:
    """Yields a group's events in order of time: one per round, at the verdict, and the notes."""
    yield from sorted([*map(round_event, group.records, parts), *group.notes], key=lambda event: event.time_s)


def group_attributes(group: RoundGroup, times: Parts) -> Attributes:
    """Returns the totals over a group's rounds as attributes; `times`: the sums of theirs."""
    records, dropped_count = group.records, group.note_count - len(group.notes)
    branches = list(map(branch_of, records))
    accepted_count = sum(record.tokens.accepted_count for record in records)
    return {
        "specdec.rounds": len(records),
        "specdec.offered": sum(record.tokens.offered_count for record in records),
        "specdec.accepted": accepted_count,
        "specdec.tokens": accepted_count + len(records),
        "specdec.discarded": sum(record.tree.discarded_count for record in records),
        "specdec.branches_hit": branches.count("hit"),
        "specdec.branches_missed": branches.count("missed"),
        "specdec.draft_messages": group.message_count,
        **milliseconds(times),
        **proposed(*records),
        **({"specdec.first_round": records[0].round_index} if records else {}),
        **({"specdec.events_dropped": dropped_count} if dropped_count else {}),
    }


class TraceNames(NamedTuple):
    """What the spans of one request name: its trace, its root, and the services of target and draft."""

    trace_id: bytes
    root_id: bytes
    target: str = ""
    draft: str = ""


def group_spans(
    group: RoundGroup, end_s: float, parts: Sequence[Parts], drafting_s: float, names: TraceNames, error: str = ""
) -> Iterator[Span]:
    """Yields the span of a group that ended and those of its sums. `parts`: of each record's time; `drafting_s`: of the
    draft's steps."""
    services = {**dict.fromkeys(TARGET_PARTS, names.target), "draft": names.draft}
    alone_s = drafting_s - sum(message.step_us for message in group.messages) / 1e6
    for part, start_s, stop_s, round_count in sums(group, parts, alone_s):
        own, said = (names.trace_id, drawn_span_id(), group.span_id), {"specdec.rounds": round_count}
        yield Span(f"{part}, summed", *own, start_s, stop_s, attributes=said, service=services.get(part, ""))
    own, said = (names.trace_id, group.span_id, names.root_id), group_attributes(group, total(parts))
    events = group_events(group, parts)
    yield Span(group_name(group), *own, group.start_s, end_s, attributes=said, events=events, error=error)
