"""Which sessions of a target have room in its cache, who waits for room, and who gives way.

A session takes blocks as it grows. When there are none left the youngest gives its own to an older one and is opened
again later, from the tokens that the replica holds: nobody else notices. Who finds no room waits with what it holds.
Committed prefixes are published, so a session that begins as another did, or as itself before it was evicted, starts
with what is still there. Runs on the engine thread; what is computed is decided elsewhere.

Rules, from which it follows that every session ends, whatever others do:
1. Room is taken from younger sessions only. So the oldest of all goes on, and each session is the oldest some day:
   those that wait go on in order of age, and while any waits nobody new is taken in.
2. A session that was taken in, or opened again, has room for a run: so many positions more that feeding it was worth
   it. It gives way to nobody until it used them up, or asked for nothing during IDLE_S. An older one that needs room
   meanwhile waits.
3. A session that needs more than the whole cache is refused when it is opened, so one alone always has room.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from specdec.engine.block_table import BlockTable
from specdec.engine.feed import Feed
from specdec.engine.scheduler import Engine
from specdec.errors import CacheExhausted, InvalidRequest
from specdec.protocol.items import Open
from specdec.protocol.types import Description
from specdec.replica.figures import SessionCounts
from specdec.replica.sessions import HeldSession, HeldSessions, Lane
from specdec.telemetry.logs import get_logger

RUN_POSITIONS = 64  # of a run, at least
RUN_SHARE = 0.25  # of what was fed, at least: a token of a prompt takes a tenth of a decode, so most of the time is use
IDLE_S = 0.25  # many times what a coordinator needs to ask again, and a pause no reader notices


def run_end(length: int, table: BlockTable) -> int:
    """Where the run of a session ends that is about to feed `length` tokens."""
    return min(length + max(RUN_POSITIONS, int(RUN_SHARE * length)), table.capacity)


@dataclass(slots=True)
class CacheCounters:
    """What became of the cache's room since the replica started, in tokens and sessions."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    evictions: int = 0
    reopenings: int = 0
    refusals: int = 0


@dataclass(slots=True, eq=False)
class GrowingSession(HeldSession):
    """A session whose table grows. `run_end`: not evicted before its cache is so long. `quiet_since_s`: when its last
    work was done. `cached_count`: tokens found when it was taken in; `evictions`: since its last evidence."""

    is_admitted: bool = False
    run_end: int = 0
    quiet_since_s: float = 0.0
    cached_count: int = 0
    evictions: int = 0


class GrowingSessions(HeldSessions):
    """The sessions of a target replica. `fed` is told of every feed, `dropped` also of sessions that wait for room."""

    def __init__(
        self, engine: Engine, description: Description, session_count_max: int, shares_prefixes: bool = True
    ) -> None:
        super().__init__(engine, description, session_count_max)
        self.counters = CacheCounters()
        self.fed: Callable[[HeldSession, Feed], None] = lambda held, feed: None
        self._shares_prefixes = shares_prefixes
        self._waiting: set[GrowingSession] = set()
        self._tried: tuple[GrowingSession, int] | None = None  # who last found too few blocks free, and how many

    def counts(self) -> SessionCounts:
        """How many there are, and wait; from another thread a figure for metrics."""
        return SessionCounts(len(self._sessions), len(self._waiting), self.session_count_max)

    def take_turn(self) -> float:
        """Opens again, or lets grow, who waits, oldest first, as far as there is room.

        Returns the seconds after which another turn may help though nothing happens, 0 for none.
        """
        while self._waiting:
            held = next(held for held in self._sessions.values() if held in self._waiting)
            if not self._has_room(held, held.lanes[0]):
                return IDLE_S
            self._waiting.remove(held)
            self._feed(held, held.lanes[0])
        return 0.0

    def _table_for(self, item: Open) -> BlockTable:
        cache = self.engine.cache
        if item.length_max > cache.position_count:
            limit = f"at most {cache.position_count}, all positions of the target's cache; raise --kv-cache-bytes"
            raise InvalidRequest("length_max", item.length_max, limit)
        return cache.open(item.length_max, item.cache_salt)

    def _begin(self, held: GrowingSession, lane: Lane) -> None:
        lane.feed = None
        if not held.is_admitted:
            self._admit(held, lane)
            self._feed(held, lane)
        elif lane.table.block_ids and self._has_room(held, lane):
            self._waiting.discard(held)
            self._feed(held, lane)
        else:
            self._wait(held)

    def _feed(self, held: GrowingSession, lane: Lane) -> None:
        super()._feed(held, lane)
        self.fed(held, lane.feed)

    def _finished(self, held: GrowingSession, lane: Lane) -> None:
        held.quiet_since_s = time.perf_counter()
        self._publish(held, lane)

    def _admit(self, held: GrowingSession, lane: Lane) -> None:
        """Takes a new session in. Raises CacheExhausted, and it is gone, where it does not fit beside the others."""
        if not self._waiting and self._start(held, lane):
            held.is_admitted, held.cached_count = True, lane.table.length
            return
        self.counters.refusals += 1
        self._drop(next(key for key, other in self._sessions.items() if other is held))
        waiting = f" and {len(self._waiting)} sessions wait for room" if self._waiting else ""
        free_count = self.engine.cache.free_block_count
        raise CacheExhausted(f"{len(lane.fed)} tokens and room to go on do not fit: {free_count} blocks free{waiting}")

    def _has_room(self, held: GrowingSession, lane: Lane) -> bool:
        """Whether all that a lane was asked to feed has blocks now; the youngest give way to it where that helps."""
        while not (self._grow(lane.table, len(lane.fed)) if lane.table.block_ids else self._reopen(held, lane)):
            sessions = list(self._sessions.values())
            younger = [other for other in sessions[sessions.index(held) + 1 :] if other.lanes[0].table.block_ids]
            evictable = [other for other in younger if not self._is_running(other)]
            if not evictable or not self._would_fit(lane, evictable):
                return False
            self._evict(evictable[-1])
        return True

    def _would_fit(self, lane: Lane, evictable: list[GrowingSession]) -> bool:
        """Whether so many sessions giving way would be enough, were nothing shared."""
        cache, table = self.engine.cache, lane.table
        end = len(lane.fed) if table.block_ids else run_end(len(lane.fed), table)
        freed_count = sum(len(other.lanes[0].table.block_ids) for other in evictable)
        return cache.blocks_for(end) - len(table.block_ids) <= cache.free_block_count + freed_count

    def _reopen(self, held: GrowingSession, lane: Lane) -> bool:
        """Gives an evicted session room again. It looks again only once more blocks are free than when it last did."""
        free_count = self.engine.cache.free_block_count
        if self._tried is not None and self._tried[0] is held and free_count <= self._tried[1]:
            return False
        if not self._start(held, lane):
            self._tried = held, free_count
            return False
        self.counters.reopenings += 1
        length, cached = len(lane.fed), lane.table.length
        get_logger().info("session opened again", **held.log_names, length=length, cached=cached)
        return True

    def _start(self, held: GrowingSession, lane: Lane) -> bool:
        """Gives an empty lane room for what it was asked and for a run, with what is cached of it; else nothing."""
        cache, table, work = self.engine.cache, lane.table, lane.work
        assert work is not None, "a session takes room for what it was asked"
        length = len(work.wanted)
        found = cache.adopt(table, work.wanted) if self._shares_prefixes else 0
        cache.truncate(table, min(found, length - work.logit_count))
        held.run_end = run_end(length, table)
        if not self._grow(table, held.run_end):
            cache.vacate(table)
            return False
        lane.agreed = 0  # what was found is compared with the session's tokens like anything else
        if self._shares_prefixes:
            self.counters.prefix_query_tokens += length
            self.counters.prefix_hit_tokens += table.length
        return True

    def _grow(self, table: BlockTable, end: int) -> bool:
        try:
            self.engine.cache.prepare_write(table, end)
        except CacheExhausted:
            return False
        return True

    def _is_running(self, held: GrowingSession) -> bool:
        """Whether it was promised to go on and may still do so by itself."""
        lane = held.lanes[0]
        is_idle = lane.work is None and time.perf_counter() - held.quiet_since_s >= IDLE_S
        return lane.table.length < held.run_end and held not in self._waiting and not is_idle

    def _evict(self, held: GrowingSession) -> None:
        """Takes its blocks; what it was asked, or is asked next, waits until it has some again."""
        lane = held.lanes[0]
        self._publish(held, lane)
        get_logger().info("session evicted", **held.log_names, length=lane.table.length)
        self.engine.cache.vacate(lane.table)
        self.counters.evictions += 1
        held.evictions += 1
        lane.feed = None
        if lane.work is not None:
            self._wait(held)

    def _wait(self, held: GrowingSession) -> None:
        self._waiting.add(held)
        self.dropped(held)

    def _publish(self, held: GrowingSession, lane: Lane) -> None:
        """Lets others find the committed tokens that the cache holds."""
        if self._shares_prefixes:
            length = min(held.agreement(lane, held.tokens), len(held.tokens))
            self.engine.cache.publish(lane.table, held.tokens, length)

    def _drop(self, key: tuple[object, int]) -> None:
        held = self._sessions[key]
        self._waiting.discard(held)
        if held.lanes[0].table.block_ids:
            self._publish(held, held.lanes[0])
        super()._drop(key)
