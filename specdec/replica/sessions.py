"""Sessions as a replica holds them: committed tokens, and a cache that is derived from them by position.

All of it lives on the engine thread. Rollback is a comparison: what was fed agrees with what is wanted up to some
length, the cache is truncated there, the rest is fed. A session belongs to the stream that opened it, so no other
stream can name it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.engine.block_table import BlockTable
from specdec.engine.feed import Feed, StepTiming
from specdec.engine.scheduler import Engine
from specdec.errors import CacheExhausted, InvalidRequest, ReplicaUnavailable, SpecdecError
from specdec.protocol.items import Close, Extend, Open, Short
from specdec.protocol.types import Description, check_token_ids
from specdec.replica.figures import SessionCounts
from specdec.rpc.status import failure_from_error
from specdec.telemetry.logs import get_logger

Reply = Callable[[object], None]
STOPPING = "the replica stops and takes no more sessions"


def log_names(opened: Open) -> dict[str, object]:
    """What every line about a session carries."""
    return {"trace_id": opened.trace.trace_id.hex(), "session": opened.session}


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done with the logits after the last `logit_count` tokens of `wanted`, asked at `asked_s`."""

    wanted: list[int]
    logit_count: int
    payload: object
    done: Callable[[object, StepTiming], None]
    excused: Callable[[SpecdecError], bool]
    asked_s: float


@dataclass(slots=True, eq=False)
class Lane:
    """One sequence of a session in the cache: `fed[:table.length]` is what it holds.

    `agreed`: `fed[:agreed]` is known to equal the session's tokens, so comparisons start there. `fed` is replaced and
    never changed, so lanes may share it. `work` is what it was asked and has not done; `feed` does it.
    """

    table: BlockTable
    fed: list[int] = field(default_factory=list)
    agreed: int = 0
    work: Work | None = None
    feed: Feed | None = None


@dataclass(slots=True, eq=False)
class HeldSession:
    """One session: `tokens` are the committed ones it knows. The first lane may grow to all of it; a draft has more,
    one for each branch, forked where they part."""

    opened: Open
    lanes: list[Lane]
    reply: Reply
    tokens: list[int] = field(default_factory=list)

    @property
    def name(self) -> tuple[int, int]:
        """(session, incarnation), as every item names it."""
        return self.opened.session, self.opened.incarnation

    @property
    def log_names(self) -> dict[str, object]:
        """What every line about it carries."""
        return log_names(self.opened)

    @property
    def capacity(self) -> int:
        """Most positions it may come to hold."""
        return self.lanes[0].table.capacity

    def hold(self, start_position: int, token_ids: Sequence[int]) -> bool:
        """Takes committed tokens from `start_position` on; False when tokens before it are missing.

        The coordinator is the only truth: tokens that disagree replace what was held from there on.
        """
        if start_position > len(self.tokens):
            return False
        end = start_position + len(token_ids)
        if self.tokens[start_position:end] != list(token_ids):
            del self.tokens[start_position:]
            self.tokens.extend(token_ids)
            for lane in self.lanes:
                lane.agreed = min(lane.agreed, start_position)
        return True

    def agreement(self, lane: Lane, wanted: Sequence[int]) -> int:
        """How many tokens of `wanted`, which begins with `tokens`, a lane holds already."""
        length = min(lane.agreed, lane.table.length)
        end = min(len(wanted), lane.table.length)
        while length < end and lane.fed[length] == wanted[length]:
            length += 1
        lane.agreed = min(length, len(self.tokens))
        return length


class HeldSessions:
    """The sessions of all streams of one replica, and the engine that computes for them. Engine thread only."""

    def __init__(self, engine: Engine, description: Description, session_count_max: int) -> None:
        self.engine = engine
        self.description = description
        self.session_count_max = session_count_max
        self.dropped: Callable[[HeldSession], None] = lambda held: None  # told of every session that ends
        self._sessions: dict[tuple[object, int], HeldSession] = {}
        self._emptied: Callable[[], None] | None = None

    def drain(self, emptied: Callable[[], None]) -> None:
        """Takes no more sessions; `emptied` is called once, when none is left."""
        self._emptied = emptied
        self.say_when_empty()

    def say_when_empty(self) -> None:
        """Says so when all sessions of a replica that drains have ended."""
        if self._emptied is not None and not self._sessions:
            self._emptied()

    def counts(self) -> SessionCounts:
        """How many there are; from another thread a figure for metrics."""
        return SessionCounts(len(self._sessions), 0, self.session_count_max)

    def open(self, stream: object, item: Open, reply: Reply, make: Callable[..., HeldSession]) -> HeldSession | None:
        """Reserves and files a session; None for an incarnation already open or older. Raises SpecdecError."""
        key = (stream, item.session)
        held = self._sessions.get(key)
        if held is not None:
            if held.opened.incarnation >= item.incarnation:
                return None
            self._drop(key)
        elif self._emptied is not None:
            raise ReplicaUnavailable(STOPPING)
        if len(self._sessions) >= self.session_count_max:
            raise CacheExhausted(f"all {self.session_count_max} session slots are taken; raise --max-num-seqs")
        session = self._sessions[key] = make(item, [Lane(self._table_for(item))], reply)
        return session

    def _table_for(self, item: Open) -> BlockTable:
        """Its place in the cache, with all the room it may need. Raises SpecdecError; then nothing was allocated."""
        return self.engine.cache.reserve(min(item.length_max, self.description.positions_max))

    def log_names(self, stream: object, item: Any) -> dict[str, object]:
        """What a line about an item carries: what its session does, where it is open."""
        held = self._sessions.get((stream, item.session))
        opened = item if isinstance(item, Open) else None if held is None else held.opened
        return {"session": item.session} if opened is None else log_names(opened)

    def find(self, stream: object, item) -> HeldSession | Short | None:
        """The session an item names; None when the item is older than it, Short when it has to be opened again."""
        held = self._sessions.get((stream, item.session))
        if held is None or held.opened.incarnation < item.incarnation:
            return Short(item.session, item.incarnation, 0, unknown=True)
        return held if held.opened.incarnation == item.incarnation else None

    def extend(self, held: HeldSession, item: Extend) -> Short | None:
        """Holds committed tokens; Short when tokens before them are missing. Raises InvalidRequest."""
        check_token_ids("token_ids", item.token_ids, self.description.vocabulary_size)
        if item.start_position + len(item.token_ids) > held.opened.length_max:
            end = item.start_position + len(item.token_ids)
            raise InvalidRequest("start_position", end, f"with its tokens at most length_max {held.opened.length_max}")
        return None if held.hold(item.start_position, item.token_ids) else Short(*held.name, len(held.tokens))

    def all(self) -> Iterable[HeldSession]:
        """The sessions of all streams."""
        return self._sessions.values()

    def close(self, stream: object, item: Close) -> None:
        """Ends a session of this or an older incarnation; nothing for one that is not open."""
        held = self._sessions.get((stream, item.session))
        if held is not None and held.opened.incarnation <= item.incarnation:
            self._drop((stream, item.session))

    def close_stream(self, stream: object) -> None:
        """Ends all sessions of a stream that is gone."""
        for key in [key for key in self._sessions if key[0] is stream]:
            self._drop(key)

    def _drop(self, key: tuple[object, int]) -> None:
        held = self._sessions.pop(key)
        self.dropped(held)
        for lane in held.lanes:
            self.release(lane)

    def release(self, lane: Lane) -> None:
        """Gives a lane's blocks back; a feed of it that has not run never will."""
        lane.work = lane.feed = None
        self.engine.cache.release(lane.table)

    def submit(
        self,
        held: HeldSession,
        lane: Lane,
        wanted: list[int],
        logit_count: int,
        payload: object,
        done: Callable[[object, StepTiming], None],
        excused: Callable[[SpecdecError], bool] = lambda error: False,
    ) -> None:
        """Feeds what the lane lacks of `wanted`, the last `logit_count` tokens at least; supersedes an older feed.

        `wanted` begins with the session's tokens and is the lane's from here on. A failure is answered, unless
        `excused` says that it was dealt with.
        """
        start = min(held.agreement(lane, wanted), len(wanted) - logit_count)
        self.engine.cache.truncate(lane.table, start)
        lane.fed = wanted
        lane.agreed = min(lane.agreed, start)
        lane.work = Work(wanted, logit_count, payload, done, excused, time.perf_counter())
        self._begin(held, lane)

    def _begin(self, held: HeldSession, lane: Lane) -> None:
        """Feeds what a lane was asked, as soon as there is room: here at once, since all of it was reserved."""
        self._feed(held, lane)

    def _finished(self, held: HeldSession, lane: Lane) -> None:
        """A lane has done what it was asked: the positions it was fed are valid."""

    def _feed(self, held: HeldSession, lane: Lane) -> None:
        """Hands what a lane was asked to the engine, from its cached length on."""
        work = lane.work
        assert work is not None, "a lane is fed what it was asked"

        def failed(error: SpecdecError) -> None:
            lane.work = lane.feed = None
            if not work.excused(error):
                get_logger().warning("work failed", **held.log_names, reason=error.reason)
                held.reply(failure_from_error(error, *held.name))

        def finished(result: object, timing: StepTiming) -> None:
            lane.work = lane.feed = None
            self._finished(held, lane)
            work.done(result, timing)

        feed = Feed(
            table=lane.table,
            start_position=lane.table.length,
            token_ids=work.wanted[lane.table.length :],
            logit_count=work.logit_count,
            payload=work.payload,
            done=finished,
            failed=failed,
            is_current=lambda: lane.feed is feed,
        )
        lane.feed = feed
        self.engine.submit(feed)
        feed.submitted_s = work.asked_s
