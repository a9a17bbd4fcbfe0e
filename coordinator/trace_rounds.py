"""Rounds and draft messages in a trace: the choice of detailed ones, their attributes, and the round groups.

A detailed round is up to seven spans in two services, and the draft steps before it one each: the prefill, then the
first round of some groups. All others are events of their group and, summed, one span for each part of their time
(`sum_spans`), laid end to end behind the detailed round: the spans of a group cover its time once, so views that add up
spans give the shares of the statistics. Spans are a function of records and notes alone. Records become events only
when the span is sent, by the thread that sends it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from specdec.protocol.items import Nodes, Trace
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
KEPT_ROUND_COUNT = 4096  # of the choices by round index, which every request asks for again
TARGET_PARTS = ("queue", "forward", "sampling", "heads")
Attributes: TypeAlias = dict[str, AttributeValue]


class Parts(NamedTuple):
    """The parts of a time, in seconds: wait for draft tokens, network both ways, the target's queue, forward pass,
    sampler and heads, and this process's own work."""

    wait: float = 0.0
    network: float = 0.0
    queue: float = 0.0
    forward: float = 0.0
    sampling: float = 0.0
    heads: float = 0.0
    rule: float = 0.0

    def plus(self, others: Iterable[Parts]) -> Parts:
        """Returns the sums of these parts and of others."""
        return Parts(*map(sum, zip(self, *others)))


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
    """Returns the parts of a round's time, whose sum it is.

    Network time is (t3 - t0) - (t2 - t1), the round trip by this clock less the time at the target by its own clock; it
    includes the handling of the messages by both processes.
    """
    server_s, times = record.server_share_s, record.times
    forward_s = min(record.step.forward_s, server_s)  # whatever the target says
    sampling_s = min(record.step.sampling_s, server_s - forward_s)
    heads_s = min(record.step.head_s, server_s - forward_s - sampling_s)
    rule_s = max(0.0, times.round_s - times.wait_s - times.round_trip_s)
    of_target = record.server_wait_s, forward_s, sampling_s, heads_s
    return Parts(times.wait_s, times.round_trip_s - server_s, *of_target, rule_s)


def branch_of(record: RoundRecord) -> str:
    """Whether the recovered token was among the branch children, "hit" or "missed"; "" where there was no guess."""
    if record.tokens.next_kind is TokenKind.BONUS or not record.tree.was_looked_up:
        return ""
    return "hit" if record.tree.was_found else "missed"


def milliseconds(**times_s: float | None) -> Attributes:
    """Returns times as attributes in milliseconds, without those that are unknown."""
    return {f"specdec.{name}_ms": round(1000 * time_s, 4) for name, time_s in times_s.items() if time_s is not None}


def not_empty(**values: Any) -> Attributes:
    """Returns as attributes the values that are not zero, false or empty."""
    return {f"specdec.{name}": value for name, value in values.items() if value}


def proposed(*records: RoundRecord) -> str:
    """Returns the accepted and offered tokens of rounds by proposer, in words; "" if only the draft model proposed."""
    offered = [proposer for record in records for proposer in record.tokens.proposers]
    if offered.count(Proposer.DRAFT) == len(offered):
        return ""
    accepted = [proposer for record in records for proposer in record.tokens.accepted_proposers]
    return ", ".join(f"{own.name.lower()} {accepted.count(own)}/{offered.count(own)}" for own in sorted(set(offered)))


def round_attributes(record: RoundRecord) -> Attributes:
    """Returns the attributes of a round's event, and of its span if it has one, without the parts of its time."""
    tokens, discarded_count = record.tokens, record.tree.discarded_count
    own = {"discarded": discarded_count, "proposed": proposed(record), "branch": branch_of(record)}
    return {
        "specdec.round": record.round_index,
        "specdec.offered": tokens.offered_count,
        "specdec.accepted": tokens.accepted_count,
        "specdec.next": tokens.next_kind.name.lower(),
        **not_empty(**own),
    }


def round_event(record: RoundRecord, parts: Parts) -> SpanEvent:
    """Returns the event of a round. The parts of its time are one attribute in words: six would cost as much to send as
    all the rest."""
    in_words = ", ".join(f"{name} {1000 * part_s:.2f}" for name, part_s in zip(Parts._fields, parts) if part_s)
    return SpanEvent("round", record.times.end_s, {**round_attributes(record), "specdec.parts_ms": in_words})


def link_attributes(stamps: Stamps) -> Attributes:
    """Returns the attributes from a link's stamps: network time of its last exchange, and the clock offset."""
    return milliseconds(network=stamps.network_s, clock_offset=stamps.clock_offset_s)


def hop_attributes(record: RoundRecord, stamps: Stamps) -> Attributes:
    """Returns the hop of one verification: the round trip is the time at the target, the network time by the messages'
    stamps, and the rest, the handling of the messages by both processes."""
    round_trip_s, away_s = record.times.round_trip_s, parts_of(record).network
    network_s = away_s if stamps.network_s is None else min(away_s, stamps.network_s)
    times_s = {"server": round_trip_s - away_s, "network": network_s, "handling": away_s - network_s}
    return {
        **link_attributes(stamps),
        "specdec.round": record.round_index,
        "specdec.offered": record.tokens.offered_count,
        **milliseconds(round_trip=round_trip_s, **times_s),
    }


def wasted_events(record: RoundRecord) -> Iterator[SpanEvent]:
    """Yields a round's wasted work as events of its own span."""
    if discarded_count := record.tree.discarded_count:
        yield SpanEvent("draft tokens discarded", record.times.end_s, {"specdec.discarded": discarded_count})
    if branch_of(record) == "missed":
        yield SpanEvent("branch missed", record.times.end_s)


class DraftMessage(NamedTuple):
    """A message of the draft in detail: its span, its arrival, the names of its tokens, and the time of its step."""

    span_id: bytes
    arrived_s: float
    names: frozenset[tuple[int, int]]
    step_us: int


class TraceNames(NamedTuple):
    """What the spans of one request name: its trace, its root and that one's parent, the services of target and draft;
    of a lost draft too."""

    trace_id: bytes
    root_id: bytes
    parent_id: bytes = b""
    target: str = ""
    draft: str = ""

    def span(self, name: str, span_id: bytes, parent_id: bytes, start_s: float, end_s: float, **more: Any) -> Span:
        """Returns a span; an empty `span_id` is drawn."""
        return Span(name, self.trace_id, span_id or drawn_span_id(), parent_id, start_s, end_s, **more)


@dataclass(slots=True, eq=False)
class RoundGroup:
    """The prefill or a round group, as its trace keeps it until it ends: the records of its rounds, the messages of the
    draft in detail, its own and those of the group before (`earlier`), and the events outside the rounds."""

    context: Trace  # of its own span
    index: int = 0
    start_s: float = 0.0
    earlier: Sequence[DraftMessage] = ()
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

    def arrived(self, nodes: Nodes, late_count: int, stamps: Stamps, root_id: bytes, arrived_s: float) -> None:
        """Adds a message of the draft, and the event of one in detail, up to ARRIVAL_COUNT_MAX."""
        self.message_count += 1
        self.drafting_us += nodes.worked_us
        if not (nodes.is_detailed and nodes.nodes) or len(self.messages) == ARRIVAL_COUNT_MAX:
            return
        names = frozenset((nodes.epoch, node.node_id) for node in nodes.nodes)
        self.messages.append(DraftMessage(draft_span_id(root_id, nodes), arrived_s, names, nodes.step_us))
        attributes = {
            "specdec.draft_tokens": len(nodes.nodes),
            "specdec.branch_tokens": sum(not node.proposal for node in nodes.nodes),
            "specdec.tokens_too_late": late_count,
            "specdec.step_rows": nodes.step_rows,
            "specdec.step_ms": nodes.step_us / 1000,
            **link_attributes(stamps),
        }
        self.note(SpanEvent("draft tokens arrived", arrived_s, attributes))

    @property
    def span_id(self) -> bytes:
        """The id of its own span."""
        return self.context.span_id

    @property
    def round_began_s(self) -> float:
        """When the round under way began."""
        return self.records[-1].times.end_s if self.records else self.start_s

    def context_of(self, round_index: int) -> Trace:
        """Returns the context of a round: its own span in detail, or this one. The prefill is its own round."""
        if not is_round_detailed(round_index):
            return self.context
        own_id = derived_span_id(self.span_id, "round") if round_index else self.span_id
        return Trace(self.context.trace_id, own_id, sampled=True, detailed=True)


def links_of(record: RoundRecord, messages: Sequence[DraftMessage], trace_id: bytes) -> Iterator[SpanLink]:
    """Yields links from a round to the messages whose tokens it offered, with the number accepted."""
    brought = {name: message for message in messages for name in message.names}
    sources = [brought.get(name) if name is not None else None for name in record.tree.names]
    for message in messages:
        if message in sources:
            said = {
                "specdec.offered": sources.count(message),
                "specdec.accepted": sum(sources[place] is message for place in record.tree.accepted),
            }
            lead = milliseconds(arrival_lead=record.times.sent_s - message.arrived_s)
            yield SpanLink(trace_id, message.span_id, lead | said)


def round_spans(record: RoundRecord, group: RoundGroup, names: TraceNames, stamps: Stamps) -> Iterator[Span]:
    """Yields the spans of a round in detail, the newest of its group. `stamps`: of the link to the target."""
    own_id, times, sent_s = group.context_of(record.round_index).span_id, record.times, record.times.sent_s
    if times.wait_s:
        yield names.span("wait", b"", own_id, sent_s - times.wait_s, sent_s)
    more: dict[str, Any] = {"kind": SpanKind.CLIENT, "attributes": hop_attributes(record, stamps)}
    verify_id = derived_span_id(own_id, "verify")
    yield names.span("verify", verify_id, own_id, sent_s, sent_s + times.round_trip_s, **more)
    if own_id != group.span_id:
        more = {"attributes": round_attributes(record) | milliseconds(**parts_of(record)._asdict())}
        more["links"] = tuple(links_of(record, (*group.earlier, *group.messages), names.trace_id))
        more["events"] = wasted_events(record)
        yield names.span("round", own_id, group.span_id, times.start_s, times.end_s, **more)


def unanswered_spans(
    round_index: int, sent_s: float, end_s: float, group: RoundGroup, names: TraceNames, error: str
) -> Iterator[Span]:
    """Yields the spans of a round whose verification is in flight at the end. `error`: of this side, or empty."""
    own = group.context_of(round_index)
    verify_id = derived_span_id(own.span_id, "verify") if own.detailed else b""
    said = {"specdec.unanswered": True, **({"error.type": error} if error else {})}
    more = {"kind": SpanKind.CLIENT, "attributes": said, "error": error}
    yield names.span("verify", verify_id, own.span_id, sent_s, end_s, **more)
    if own.span_id != group.span_id:
        yield names.span("round", own.span_id, group.span_id, group.round_began_s, end_s)


def slow_round_event(records: Sequence[RoundRecord]) -> SpanEvent | None:
    """Returns an event for the slowest round if it took more than SLOW_FACTOR times the mean of all, with the largest
    part of its time."""
    slowest = max(records, key=lambda record: record.times.round_s, default=None)
    mean_s = sum(record.times.round_s for record in records) / max(1, len(records))
    if slowest is None or slowest.times.round_s <= SLOW_FACTOR * mean_s:
        return None
    part_s, part = max(zip(parts_of(slowest), Parts._fields))
    times_s = {"round": slowest.times.round_s, "mean": mean_s, "part": part_s}
    said = {f"specdec.{name}_ms": round(1000 * time_s, 1) for name, time_s in times_s.items()}
    return SpanEvent(
        "slow round", slowest.times.end_s, {"specdec.round": slowest.round_index, "specdec.part": part, **said}
    )


def sum_spans(group: RoundGroup, parts: Sequence[Parts], drafting_s: float, names: TraceNames) -> Iterator[Span]:
    """Yields spans of the summed parts of the rounds without spans of their own.

    The parts of the rounds lie end to end from the end of the detailed round, in the order of Parts; the draft's steps
    run beside them, from the same start, and may end after the group: some began in the one before.
    """
    summed = [pair for pair in zip(group.records, parts) if not is_round_detailed(pair[0].round_index)]
    start_s = summed[0][0].times.start_s if summed else group.start_s
    said = {"attributes": {"specdec.rounds": len(group.records)}, "service": names.draft}
    if drafting_s > 0:
        yield names.span("draft, summed", b"", group.span_id, start_s, start_s + drafting_s, **said)
    spent = Parts().plus(own for _, own in summed)
    for part, part_s in spent._asdict().items():
        said = {"attributes": {"specdec.rounds": len(summed)}, "service": names.target if part in TARGET_PARTS else ""}
        if part_s > SUM_SHARE_MIN * sum(spent):
            yield names.span(f"{part}, summed", b"", group.span_id, start_s, start_s + part_s, **said)
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


def group_attributes(group: RoundGroup, parts: Sequence[Parts]) -> Attributes:
    """Returns the totals over a group's rounds as attributes."""
    records, branches = group.records, list(map(branch_of, group.records))
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
        **milliseconds(**Parts().plus(parts)._asdict()),
        **({"specdec.first_round": records[0].round_index} if records else {}),
        **not_empty(proposed=proposed(*records), events_dropped=group.note_count - len(group.notes)),
    }


def group_events(group: RoundGroup, parts: Sequence[Parts]) -> Iterator[SpanEvent]:
    """Yields a group's events in order of time: one per round, at the verdict, and the notes."""
    yield from sorted([*map(round_event, group.records, parts), *group.notes], key=lambda event: event.time_s)


def group_spans(
    group: RoundGroup, end_s: float, parts: Sequence[Parts], drafting_s: float, names: TraceNames, error: str = ""
) -> Iterator[Span]:
    """Yields the span of a group that ended and those of its sums. `parts`: of each record's time; `drafting_s`: of the
    draft's steps."""
    alone_s = drafting_s - sum(message.step_us for message in group.messages) / 1e6
    yield from sum_spans(group, parts, alone_s, names)
    more = {"attributes": group_attributes(group, parts), "events": group_events(group, parts), "error": error}
    yield names.span(group_name(group), group.span_id, names.root_id, group.start_s, end_s, **more)
