"""The prefill and the segments of a traced generation: numbers of every round, gathered at a microsecond each.

A phase is one span with totals as attributes and one event a round. Its rounds are kept as numbers and become events
only when the span is sent, by the thread that sends it. What a round means is not known here.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from specdec.telemetry.spans import SPAN_ID_BYTES, AttributeValue, Span, SpanEvent

NOTE_COUNT_MAX = 64  # of one phase: a link that comes and goes all the time is told of by its first changes
SLOW_FACTOR = 2.0  # of a segment's mean, above which its slowest round is recorded on its own
BRANCHES = ("", "hit", "missed")  # whether a correction was among the branch children; "" where none was guessed


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One round as numbers; times in seconds, `start_s` and `end_s` by the monotonic clock.

    The six times at the end add up to the round: held for draft tokens, network both ways, the target's queue, forward
    and evidence, and this process's own work. `branch` is an index into BRANCHES. `discarded_count`: draft tokens of
    the proposal path in hand that the commit left.
    """

    round_index: float
    start_s: float
    end_s: float
    offered_count: float
    accepted_count: float
    is_bonus: float
    branch: float
    discarded_count: float
    wait_s: float
    network_s: float
    queue_s: float
    forward_s: float
    evidence_s: float
    rule_s: float

    def attributes(self) -> dict[str, AttributeValue]:
        """What its event, and its span if it has one, say."""
        said: dict[str, AttributeValue] = {
            "specdec.round": int(self.round_index),
            "specdec.offered": int(self.offered_count),
            "specdec.accepted": int(self.accepted_count),
            "specdec.next": "bonus" if self.is_bonus else "correction",
            **{f"specdec.{name[:-2]}_ms": round(1000 * getattr(self, name), 4) for name in TIMES},
        }
        if self.discarded_count:
            said["specdec.discarded"] = int(self.discarded_count)
        if self.branch:
            said["specdec.branch"] = BRANCHES[int(self.branch)]
        return said

    def wasted(self) -> tuple[SpanEvent, ...]:
        """Work that came to nothing in it, as events of its own span."""
        events = []
        if self.discarded_count:
            discarded = {"specdec.discarded": int(self.discarded_count)}
            events.append(SpanEvent("draft tokens discarded", self.end_s, discarded))
        if BRANCHES[int(self.branch)] == "missed":
            events.append(SpanEvent("branch missed", self.end_s))
        return tuple(events)


FIELDS = tuple(own.name for own in fields(RoundRow))
TIMES = FIELDS[FIELDS.index("wait_s") :]


@dataclass(slots=True, eq=False)
class Phase:
    """The prefill or one segment, while its rounds go by. Read as `events` once it is over."""

    name: str
    start_s: float
    span_id: bytes = field(default_factory=lambda: os.urandom(SPAN_ID_BYTES))
    draft_message_count: int = 0
    _numbers: array = field(default_factory=lambda: array("d"))
    _notes: list[SpanEvent] = field(default_factory=list)
    _note_count: int = 0

    def add(self, *numbers: float) -> None:
        """One round, by the fields of RoundRow in order."""
        self._numbers.extend(numbers)

    def note(self, name: str, time_s: float, attributes: dict[str, AttributeValue]) -> None:
        """Something beside the rounds; beyond NOTE_COUNT_MAX only counted."""
        self._note_count += 1
        if len(self._notes) < NOTE_COUNT_MAX:
            self._notes.append(SpanEvent(name, time_s, attributes))

    @property
    def round_count(self) -> int:
        return len(self._numbers) // len(FIELDS)

    def row(self, index: int) -> RoundRow:
        """A round by its place in the phase."""
        return RoundRow(*self._numbers[index * len(FIELDS) : (index + 1) * len(FIELDS)])

    def total(self, name: str) -> float:
        """The sum of one field over the rounds."""
        return sum(self._column(name))

    def _column(self, name: str) -> array:
        return self._numbers[FIELDS.index(name) :: len(FIELDS)]

    def slow_round(self) -> RoundRow | None:
        """The slowest round, where it took far longer than the mean of all."""
        if not self.round_count:
            return None
        durations_s = [end_s - start_s for start_s, end_s in zip(self._column("start_s"), self._column("end_s"))]
        slowest_s = max(durations_s)
        is_slow = slowest_s > SLOW_FACTOR * sum(durations_s) / len(durations_s)
        return self.row(durations_s.index(slowest_s)) if is_slow else None

    def __iter__(self) -> Iterator[SpanEvent]:
        """Its events in order of time: one a round, at the verdict, and the notes."""
        rounds = [self.row(index) for index in range(self.round_count)]
        events = [SpanEvent("round", row.end_s, row.attributes()) for row in rounds]
        return iter(sorted([*events, *self._notes], key=lambda event: event.time_s))

    def attributes(self) -> dict[str, AttributeValue]:
        """Totals over its rounds."""
        branches = self._column("branch")
        said: dict[str, AttributeValue] = {
            "specdec.rounds": self.round_count,
            "specdec.offered": int(self.total("offered_count")),
            "specdec.accepted": int(self.total("accepted_count")),
            "specdec.tokens": int(self.total("accepted_count")) + self.round_count,
            "specdec.discarded": int(self.total("discarded_count")),
            "specdec.branches_hit": branches.count(BRANCHES.index("hit")),
            "specdec.branches_missed": branches.count(BRANCHES.index("missed")),
            "specdec.draft_messages": self.draft_message_count,
            **{f"specdec.{name[:-2]}_ms": round(1000 * self.total(name), 4) for name in TIMES},
        }
        if self.round_count:
            said["specdec.first_round"] = int(self._numbers[0])
        if self._note_count > len(self._notes):
            said["specdec.events_dropped"] = self._note_count - len(self._notes)
        return said

    def span(self, trace_id: bytes, parent_id: bytes, end_s: float, error: str = "") -> Span:
        """The phase as a span. It must not change from here on."""
        return Span(
            self.name,
            trace_id,
            self.span_id,
            parent_id,
            self.start_s,
            end_s,
            attributes=self.attributes(),
            events=self,
            error=error,
        )
