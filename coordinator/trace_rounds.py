"""Rounds and draft messages in a trace: the choice of detailed ones, their attributes, and the round groups.

A detailed round is up to seven spans in two services, and the draft steps before it one each: the prefill, then the
first round of some groups. All others are events of their group and, summed, one span for each part of their time
(`sums`), laid end to end behind the detailed round: the spans of a group cover its time once, so views that add up
spans give the shares of the statistics. Records are kept, and become events only when the span is sent, by the thread
that sends it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from specdec.protocol.items import Nodes
from specdec.protocol.records import RoundRecord
from specdec.protocol.session import Session
from specdec.protocol.tree import TreeNode
from specdec.protocol.types import Proposer, TokenKind
from specdec.rpc.stamps import Stamps
from specdec.telemetry.spans import AttributeValue, SpanEvent, SpanLink, draft_span_id, drawn_span_id

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
MESSAGE_COUNT_MAX = 32  # messages whose tokens a round may still offer
DRAFT_ARRIVED = "draft tokens arrived"
KEPT_ROUND_COUNT = 4096  # of the choices by round index, which every request asks for again
PARTS = ("wait", "network", "queue", "forward", "sampling", "rule")
TARGET_PARTS = ("queue", "forward", "sampling")
Parts: TypeAlias = tuple[float, ...]  # seconds, by PARTS


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


def milliseconds(parts: Parts) -> dict[str, AttributeValue]:
    """Returns times by PARTS as attributes in milliseconds."""
    return {f"specdec.{name}_ms": round(1000 * value, 4) for name, value in zip(PARTS, parts)}


def proposed(*records: RoundRecord) -> str:
    """Returns the accepted and offered tokens of rounds by proposer, in words; "" if only the draft model proposed."""
    offered = [proposer for record in records for proposer in record.tokens.proposers]
    if offered.count(Proposer.DRAFT) == len(offered):
        return ""
    accepted = [proposer for record in records for proposer in record.tokens.accepted_proposers]
    return ", ".join(f"{own.name.lower()} {accepted.count(own)}/{offered.count(own)}" for own in sorted(set(offered)))


def round_attributes(record: RoundRecord) -> dict[str, AttributeValue]:
    """Returns the attributes of a round's event, and of its span if it has one, without the parts of its time."""
    attributes: dict[str, AttributeValue] = {
        "specdec.round": record.round_index,
        "specdec.offered": record.tokens.offered_count,
        "specdec.accepted": record.tokens.accepted_count,
        "specdec.next": record.tokens.next_kind.name.lower(),
    }
    if record.tree.discarded_count:
        attributes["specdec.discarded"] = record.tree.discarded_count
    if sources := proposed(record):
        attributes["specdec.proposed"] = sources
    if branch := branch_of(record):
        attributes["specdec.branch"] = branch
    return attributes


def round_event(record: RoundRecord, parts: Parts) -> SpanEvent:
    """Returns the event of a round. The parts of its time are one attribute in words: six would cost as much to send as
    all the rest."""
    in_words = ", ".join(f"{name} {1000 * part_s:.2f}" for name, part_s in zip(PARTS, parts) if part_s)
    return SpanEvent("round", record.times.end_s, {**round_attributes(record), "specdec.parts_ms": in_words})


def link_attributes(stamps: Stamps) -> dict[str, AttributeValue]:
    """Returns the attributes from a link's stamps: network time of its last exchange, and the clock offset."""
    attributes: dict[str, AttributeValue] = {}
    if stamps.network_s is not None:
        attributes["specdec.network_ms"] = round(1000 * stamps.network_s, 4)
    if (offset_s := stamps.clock_offset_s) is not None:
        attributes["specdec.clock_offset_ms"] = round(1000 * offset_s, 4)
    return attributes


def hop_attributes(record: RoundRecord, stamps: Stamps) -> dict[str, AttributeValue]:
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


@dataclass(slots=True, eq=False)
class RoundGroup:
    """The prefill or one round group in progress. Read as events once it is over."""

    name: str
    start_s: float
    span_id: bytes = field(default_factory=drawn_span_id)
    draft_message_count: int = 0
    arrival_count: int = 0
    drafting_us: int = 0  # of the draft's steps, by the draft; those with spans of their own among them
    detailed_drafting_us: int = 0
    drafting_s: float = 0.0  # of the steps without spans, once it ended
    records: list[RoundRecord] = field(default_factory=list)
    _parts: list[Parts] = field(default_factory=list)  # of each record
    _notes: list[SpanEvent] = field(default_factory=list)
    _note_count: int = 0

    def full_name(self) -> str:
        """The name of its span. A round group says whether it speculated: plain without any draft token, mixed where
        the policy was off for a part."""
        if self.name != ROUND_GROUP or not self.records:
            return self.name
        if not any(record.tokens.offered_count for record in self.records):
            return f"{self.name}, plain"
        return f"{self.name}, {'speculative' if all(record.is_speculating for record in self.records) else 'mixed'}"

    def add(self, record: RoundRecord) -> None:
        """Adds a round that ended."""
        self.records.append(record)
        self._parts.append(parts_of(record))

    def note(self, event: SpanEvent) -> None:
        """Records an event outside the rounds; beyond NOTE_COUNT_MAX only counted."""
        self._note_count += 1
        if len(self._notes) < NOTE_COUNT_MAX:
            self._notes.append(event)

    def end_drafting(self, most_s: float) -> float:
        """Returns the time of the draft's steps, at most `most_s`, whatever the draft says."""
        total_s = min(self.drafting_us / 1e6, most_s)
        self.drafting_s = max(0.0, total_s - self.detailed_drafting_us / 1e6)
        return total_s

    def note_slow_round(self) -> bool:
        """Records an event for the slowest round if it took more than SLOW_FACTOR times the mean of all, with the
        largest part of its time; returns whether it did."""
        slowest = max(self.records, key=lambda record: record.times.round_s, default=None)
        mean_s = sum(record.times.round_s for record in self.records) / max(1, len(self.records))
        if slowest is None or slowest.times.round_s <= SLOW_FACTOR * mean_s:
            return False
        part_s, part = max(zip(parts_of(slowest), PARTS))
        said: dict[str, AttributeValue] = {
            "specdec.round": slowest.round_index,
            "specdec.round_ms": round(1000 * slowest.times.round_s, 1),
            "specdec.mean_ms": round(1000 * mean_s, 1),
            "specdec.part": part,
            "specdec.part_ms": round(1000 * part_s, 1),
        }
        self.note(SpanEvent("slow round", slowest.times.end_s, said))
        return True

    def sums(self) -> Iterator[tuple[str, float, float, int]]:
        """Yields the summed parts of the rounds without spans of their own: name, start, end, number of rounds.

        The parts of the rounds lie end to end from the end of the detailed round, in the order of PARTS; the draft's
        steps run beside them, from the same start, and may end after the group: some began in the one before.
        """
        summed = [pair for pair in zip(self.records, self._parts) if not is_round_detailed(pair[0].round_index)]
        start_s = summed[0][0].times.start_s if summed else self.start_s
        if self.drafting_s:
            yield "draft", start_s, start_s + self.drafting_s, len(self.records)
        spent = list(zip(PARTS, map(sum, zip(*(parts for _, parts in summed)))))
        for part, part_s in spent:
            if part_s > SUM_SHARE_MIN * sum(each_s for _, each_s in spent):
                yield part, start_s, start_s + part_s, len(summed)
                start_s += part_s

    def __iter__(self) -> Iterator[SpanEvent]:
        """Yields its events in order of time: one per round, at the verdict, and the notes."""
        return iter(
            sorted([*map(round_event, self.records, self._parts), *self._notes], key=lambda event: event.time_s)
        )

    def parts(self) -> Parts:
        """Returns the sums of the rounds' times."""
        return tuple(map(sum, zip(*self._parts))) if self._parts else (0.0,) * len(PARTS)

    def attributes(self) -> dict[str, AttributeValue]:
        """Returns the totals over its rounds as attributes."""
        branches = list(map(branch_of, self.records))
        accepted_count = sum(record.tokens.accepted_count for record in self.records)
        attributes: dict[str, AttributeValue] = {
            "specdec.rounds": len(self.records),
            "specdec.offered": sum(record.tokens.offered_count for record in self.records),
            "specdec.accepted": accepted_count,
            "specdec.tokens": accepted_count + len(self.records),
            "specdec.discarded": sum(record.tree.discarded_count for record in self.records),
            "specdec.branches_hit": branches.count("hit"),
            "specdec.branches_missed": branches.count("missed"),
            "specdec.draft_messages": self.draft_message_count,
            **milliseconds(self.parts()),
        }
        if sources := proposed(*self.records):
            attributes["specdec.proposed"] = sources
        if self.records:
            attributes["specdec.first_round"] = self.records[0].round_index
        if self._note_count > len(self._notes):
            attributes["specdec.events_dropped"] = self._note_count - len(self._notes)
        return attributes


class DraftMessage(NamedTuple):
    """One message in detail: its span, its arrival time, and the tree nodes of its tokens."""

    span_id: bytes
    arrived_s: float
    nodes: tuple[TreeNode, ...]


class DraftMessages:
    """The detailed messages of one generation, and those whose tokens the round in flight offers."""

    def __init__(self) -> None:
        self._recent: deque[DraftMessage] = deque(maxlen=MESSAGE_COUNT_MAX)
        self._offered: list[tuple[DraftMessage, list[tuple[int, ...]]]] = []  # and the paths of its tokens
        self._offered_s, self._base_length = 0.0, 0

    def arrived(self, session: Session, nodes: Nodes, stamps: Stamps, root_id: bytes, arrived_s: float) -> SpanEvent:
        """Returns the event of a message in detail."""
        found = [session.tree.named.get((nodes.epoch, node.node_id)) for node in nodes.nodes]
        usable = tuple(node for node in found if node is not None and node.alive)
        self._recent.append(DraftMessage(draft_span_id(root_id, nodes), arrived_s, usable))
        attributes: dict[str, AttributeValue] = {
            "specdec.draft_tokens": len(nodes.nodes),
            "specdec.branch_tokens": sum(not node.proposal for node in nodes.nodes),
            "specdec.tokens_too_late": len(nodes.nodes) - len(usable),
            "specdec.step_rows": nodes.step_rows,
            "specdec.step_ms": nodes.step_us / 1000,
            **link_attributes(stamps),
        }
        return SpanEvent(DRAFT_ARRIVED, arrived_s, attributes)

    def offer(self, session: Session, now_s: float) -> None:
        """Records that the round sent now offers the draft tokens of the session's verification in flight."""
        flying = session.in_flight
        assert flying is not None
        paths: list[tuple[int, ...]] = [()]  # from the committed tokens to each row
        for index, token_id in enumerate(flying.draft_token_ids):
            paths.append((*paths[flying.parents[index] if flying.parents else index], token_id))
        held = [(path, session.tree.node(path)) for path in paths[1:]]
        by_message = [(own, [path for path, node in held if node in own.nodes]) for own in self._recent]
        self._offered_s, self._offered = now_s, [(own, paths) for own, paths in by_message if paths]
        self._base_length = len(session.committed)

    def links(self, session: Session, accepted_count: int, trace_id: bytes) -> Iterator[SpanLink]:
        """Yields links from the round that ended to the messages whose tokens it offered, with the number accepted."""
        offered, self._offered = self._offered, []
        accepted = tuple(session.committed[self._base_length : self._base_length + accepted_count])
        for message, paths in offered:
            attributes: dict[str, AttributeValue] = {
                "specdec.arrival_lead_ms": round(1000 * (self._offered_s - message.arrived_s), 4),
                "specdec.offered": len(paths),
                "specdec.accepted": sum(path == accepted[: len(path)] for path in paths),
            }
            yield SpanLink(trace_id, message.span_id, attributes)
