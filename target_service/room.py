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

from specdec.engine.block_table import BlockTable
from specdec.engine.kv_cache import KVCache
from specdec.errors import CacheExhausted
from specdec.protocol.items import Open
from specdec.replica.handler import Reply, log_names
from specdec.telemetry.logs import get_logger
from target_service.session import TargetSession

RUN_POSITIONS = 64  # of a run, at least
RUN_SHARE = 0.25  # of what was fed, at least: a token of a prompt takes a tenth of a decode, so most of the time is use
IDLE_S = 0.25  # many times what a coordinator needs to ask again, and a pause no reader notices
COUNTERS = ("prefix_query_tokens", "prefix_hit_tokens", "evictions", "reopenings", "refusals")


def run_end(length: int, table: BlockTable) -> int:
    """Where the run of a session ends that is about to feed `length` tokens."""
    return min(length + max(RUN_POSITIONS, int(RUN_SHARE * length)), table.capacity)


class Room:
    """The cache's room and the sessions that share it, oldest first. It feeds nothing itself.

    `displaced` is told of every session that begins to wait for room, with what it was asked. `counters`: what became
    of the room since the replica started, in tokens and sessions.
    """

    def __init__(self, cache: KVCache, shares_prefixes: bool, displaced: Callable[[TargetSession], None]) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.waiting: set[TargetSession] = set()
        self._cache = cache
        self._shares_prefixes = shares_prefixes
        self._displaced = displaced
        self._sessions: dict[TargetSession, None] = {}
        self._tried: tuple[TargetSession, int] | None = None  # who last found too few blocks free, and how many

    def open(self, item: Open, reply: Reply) -> TargetSession:
        """A session without any block, the youngest from here on: room is taken with its first verification."""
        session = TargetSession(item, self._cache.open(item.length_max, item.cache_salt), reply)
        self._sessions[session] = None
        return session

    def leave(self, session: TargetSession) -> None:
        """Gives a session's blocks back for good."""
        del self._sessions[session]
        self.waiting.discard(session)
        if session.table.block_ids:
            self.publish(session)
        self._cache.release(session.table)

    def give(self, session: TargetSession) -> bool:
        """Room for what a session was asked; False where it has to wait for it. Raises CacheExhausted for one that is
        not taken in because it does not fit beside the others."""
        if not session.is_admitted:
            self._admit(session)
        elif not (session.table.block_ids and self._has_room(session)):
            self._wait(session)
            return False
        self.waiting.discard(session)
        return True

    def next_waiting(self) -> TargetSession | None:
        """The oldest session that waits, if there is room for it now: it waits no more."""
        oldest = next((one for one in self._sessions if one in self.waiting), None) if self.waiting else None
        if oldest is None or not self._has_room(oldest):
            return None
        self.waiting.remove(oldest)
        return oldest

    def publish(self, session: TargetSession) -> None:
        """Lets others find the committed tokens that the cache holds."""
        if self._shares_prefixes:
            length = min(session.agreement(()), len(session.tokens))
            self._cache.publish(session.table, session.tokens, length)

    def _admit(self, session: TargetSession) -> None:
        if self.waiting or not self._start(session):
            self.counters["refusals"] += 1
            waiting = f" and {len(self.waiting)} sessions wait for room" if self.waiting else ""
            free_count = self._cache.free_block_count
            raise CacheExhausted(
                f"{session.wanted_length} tokens and room to go on do not fit: {free_count} blocks free{waiting}"
            )
        session.is_admitted, session.cached_count = True, session.table.length

    def _has_room(self, session: TargetSession) -> bool:
        """Whether all that a session was asked has blocks now; the youngest give way to it where that helps."""
        table = session.table
        while not (self._grow(table, session.wanted_length) if table.block_ids else self._reopen(session)):
            sessions = list(self._sessions)
            younger = [other for other in sessions[sessions.index(session) + 1 :] if other.table.block_ids]
            evictable = [other for other in younger if not self._is_running(other)]
            if not evictable or not self._would_fit(session, evictable):
                return False
            self._evict(evictable[-1])
        return True

    def _would_fit(self, session: TargetSession, evictable: list[TargetSession]) -> bool:
        """Whether so many sessions giving way would be enough, were nothing shared."""
        cache, table, length = self._cache, session.table, session.wanted_length
        end = length if table.block_ids else run_end(length, table)
        freed_count = sum(len(other.table.block_ids) for other in evictable)
        return cache.blocks_for(end) - len(table.block_ids) <= cache.free_block_count + freed_count

    def _reopen(self, session: TargetSession) -> bool:
        """Gives an evicted session room again. It looks again only once more blocks are free than when it last did."""
        free_count = self._cache.free_block_count
        if self._tried is not None and self._tried[0] is session and free_count <= self._tried[1]:
            return False
        if not self._start(session):
            self._tried = session, free_count
            return False
        self.counters["reopenings"] += 1
        length, cached = session.wanted_length, session.table.length
        get_logger().info("session opened again", **log_names(session.opened), length=length, cached=cached)
        return True

    def _start(self, session: TargetSession) -> bool:
        """Gives an empty session room for what it was asked and for a run, with what is cached of it; else nothing."""
        cache, table, length = self._cache, session.table, session.wanted_length
        found = cache.adopt(table, session.tokens) if self._shares_prefixes else 0
        cache.truncate(table, min(found, len(session.tokens) - 1))
        session.run_end = run_end(length, table)
        if not self._grow(table, session.run_end):
            cache.vacate(table)
            return False
        session.fed_length, session.fed_draft = table.length, ()
        if self._shares_prefixes:
            self.counters["prefix_query_tokens"] += length
            self.counters["prefix_hit_tokens"] += table.length
        return True

    def _grow(self, table: BlockTable, end: int) -> bool:
        try:
            self._cache.prepare_write(table, end)
        except CacheExhausted:
            return False
        return True

    def _is_running(self, session: TargetSession) -> bool:
        """Whether it was promised to go on and may still do so by itself."""
        is_idle = session.work is None and time.perf_counter() - session.quiet_since_s >= IDLE_S
        return session.table.length < session.run_end and session not in self.waiting and not is_idle

    def _evict(self, session: TargetSession) -> None:
        """Takes its blocks; what it was asked, or is asked next, waits until it has some again."""
        self.publish(session)
        get_logger().info("session evicted", **log_names(session.opened), length=session.table.length)
        self._cache.vacate(session.table)
        self.counters["evictions"] += 1
        session.evictions += 1
        session.fed_length, session.fed_draft, session.feed = 0, (), None
        if session.work is not None:
            self._wait(session)

    def _wait(self, session: TargetSession) -> None:
        self.waiting.add(session)
        self._displaced(session)
