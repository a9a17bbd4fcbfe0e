"""Admission of a target: which sessions get cache blocks, which wait for them, and which are preempted.

A session takes blocks as it grows. When none are free the session that was left alone for longest is preempted, or the
youngest: an older one gets its blocks, and it is reopened later from the tokens that the replica holds, invisibly to
the other services. A session without enough blocks waits with those it holds. A text that comes from elsewhere, opened
with an age, is as old as it says and waits from the start, without blocks, where a new session is refused. Committed
prefixes are cached: a session with the same prefix, or a reopened one, starts with the blocks still in the cache. Runs
on the engine thread; the scheduling of steps is elsewhere.

Rules, from which it follows that every session ends, whatever the others do:
1. Only younger sessions are preempted for a session, and those without work for ABANDONED_S, also for a new one. So the
   oldest at work continues, and each session becomes the oldest (4): waiting sessions continue in order of age, and
   while any waits no new session is admitted.
2. An admitted or reopened session has blocks for a run: enough positions further to be worth feeding it. It is not
   preempted before it has used them up or was idle for TURNAROUND_S. An older session that needs blocks meanwhile
   waits.
3. A session that needs more than the whole cache is refused at its opening, so one alone always has enough blocks.
4. The order of age is that of births: the arrival less the age, fixed at the opening, by this replica's clock. Any
   number of sessions may come from elsewhere before a session in this order, but only of texts that began before its
   own. These are finitely many, and each ends here or leaves, so what is ahead of a session only shrinks in the end.
   That a text comes again after it was lost, and is preempted meanwhile, changes no birth. An age that is too small by
   the time on the way makes a text younger by as much: the order is another, and stays one.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable

from specdec.engine.cache.kv_cache import BlockTable, KVCache
from specdec.errors import CacheExhausted
from specdec.protocol.items import Open
from specdec.protocol.limits import DRAFT_LENGTH_LIMIT
from specdec.replica.handler import ABANDONED_S, Reply, log_names
from specdec.replica.metrics import COUNTERS
from specdec.target_service.session import TargetSession
from specdec.telemetry.logs import get_logger

RUN_POSITIONS = 64  # of a run, at least
RUN_SHARE = 0.25  # of the fed length, at least: a prompt token takes a tenth of a decode step, so decoding dominates
TURNAROUND_S = 0.25  # many times a coordinator's turnaround, and a pause no client notices


def guaranteed_length(session: TargetSession) -> int:
    """Returns the cell at which the run of a session ends that is about to feed its request."""
    length = session.wanted_length
    return max(length, min(length + max(RUN_POSITIONS, int(RUN_SHARE * length)), session.opened.length_max))


class Admission:
    """The sessions that share the cache, by birth, the oldest first, and their blocks. It feeds nothing itself.

    `displaced` is called with every session that begins to wait for blocks with a request pending. `counters`: prefix
    hits, preemptions, reopenings and refusals since the replica started, in tokens and sessions.
    """

    def __init__(self, cache: KVCache, shares_prefixes: bool, displaced: Callable[[TargetSession], None]) -> None:
        self.counters = dict.fromkeys((*COUNTERS, "refusals"), 0)
        self.waiting: set[TargetSession] = set()
        self._cache = cache
        self._shares_prefixes = shares_prefixes
        self._displaced = displaced
        self._sessions: list[TargetSession] = []
        self._tried: tuple[TargetSession, int] | None = None  # the last that failed to start, and the free blocks then

    def open(self, item: Open, reply: Reply) -> TargetSession:
        """Returns a new session without blocks, the youngest but for its age; its first verification allocates them."""
        capacity = min(item.length_max + DRAFT_LENGTH_LIMIT, self._cache.position_count)  # with the branches of a tree
        session = TargetSession(item, self._cache.open(capacity, item.cache_salt), reply)
        session.born_s = time.perf_counter() - item.age_ms / 1000
        bisect.insort(self._sessions, session, key=lambda one: one.born_s)  # of equal ones the last
        return session

    def leave(self, session: TargetSession) -> None:
        """Ends a session: caches its prefix and releases its blocks."""
        self._sessions.remove(session)
        self.waiting.discard(session)
        if session.table.block_ids:
            self.cache_prefix(session)
        self._cache.release(session.table)

    def give(self, session: TargetSession) -> bool:
        """Allocates the blocks for a session's request; False if it has to wait for them. Raises CacheExhausted for a
        new session, one without an age, that does not fit beside the others."""
        if not session.is_admitted and not session.opened.age_ms:
            self._admit(session)
        elif not ((session.table.block_ids or not self.waiting) and self._has_capacity(session)):
            self._wait(session)
            return False
        self.waiting.discard(session)
        return True

    def next_waiting(self) -> TargetSession | None:
        """Returns the oldest waiting session if its blocks can be allocated now, and ends its wait; else None."""
        oldest = next((one for one in self._sessions if one in self.waiting), None) if self.waiting else None
        if oldest is None or not self._has_capacity(oldest):
            return None
        self.waiting.remove(oldest)
        return oldest

    def cache_prefix(self, session: TargetSession) -> None:
        """Makes the session's committed tokens in the cache available to other sessions."""
        if self._shares_prefixes:
            length = min(session.agreement(), len(session.tokens))
            self._cache.cache_prefix(session.table, session.tokens, length)

    def _admit(self, session: TargetSession) -> None:
        while not self.waiting and not self._start(session):
            left = self._left()
            if not left or not self._would_fit(session, left):
                break
            self._preempt(left[-1])
        if not session.table.block_ids:
            self.counters["refusals"] += 1
            waiting = f" and {len(self.waiting)} sessions wait" if self.waiting else ""
            free_count = self._cache.free_block_count
            raise CacheExhausted(
                f"{session.wanted_length} tokens and space to go on do not fit: {free_count} blocks free{waiting}"
            )

    def _has_capacity(self, session: TargetSession) -> bool:
        """Whether a session's request has all its blocks now; preempts the sessions left alone, then the youngest, if
        that is enough."""
        while not (self._fits(session) if session.table.block_ids else self._reopen(session)):
            younger = self._sessions[self._sessions.index(session) + 1 :]
            younger = [other for other in younger if other.table.block_ids]
            left = [other for other in self._left() if other is not session]
            preemptable = [other for other in younger if not self._is_running(other) and other not in left] + left
            if not preemptable or not self._would_fit(session, preemptable):
                return False
            self._preempt(preemptable[-1])
        return True

    def _would_fit(self, session: TargetSession, preemptable: list[TargetSession]) -> bool:
        """Whether preempting these sessions would free enough blocks, if none were shared."""
        cache, table = self._cache, session.table
        end = session.wanted_length if table.block_ids else guaranteed_length(session)
        freed_count = sum(len(other.table.block_ids) for other in preemptable)
        needed_count = cache.blocks_for(end) - len(table.block_ids)
        return needed_count <= cache.free_block_count + freed_count

    def _reopen(self, session: TargetSession) -> bool:
        """Allocates blocks for a session without any: a preempted one, or one from elsewhere. Retries only once more
        blocks are free than at its last try."""
        free_count = self._cache.free_block_count
        if self._tried is not None and self._tried[0] is session and free_count <= self._tried[1]:
            return False
        was_admitted = session.is_admitted
        if not self._start(session):
            self._tried = session, free_count
            return False
        if was_admitted:
            self.counters["reopenings"] += 1
            length, cached = session.wanted_length, session.table.length
            get_logger().info("session opened again", **log_names(session.opened), length=length, cached=cached)
        return True

    def _start(self, session: TargetSession) -> bool:
        """Allocates blocks for an empty session's request and a run, after its cached prefix; all of them or none."""
        cache, table, length = self._cache, session.table, session.wanted_length
        tokens = session.tokens[: session.reused_max] if session.scored_index else session.tokens
        found = cache.match_prefix(table, tokens) if self._shares_prefixes else 0
        cache.truncate(table, min(found, session.reused_max))
        session.guaranteed_length = guaranteed_length(session)
        if not self._grow(table, session.guaranteed_length):
            cache.free(table)
            return False
        session.holds(table.length)
        if not session.is_admitted:
            session.is_admitted, session.cached_count = True, table.length
        if self._shares_prefixes:
            self.counters["prefix_query_tokens"] += length
            self.counters["prefix_hit_tokens"] += table.length
        return True

    def _fits(self, session: TargetSession) -> bool:
        """Allocates the blocks of a session's request, all of them or none."""
        return self._grow(session.table, session.wanted_length)

    def _grow(self, table: BlockTable, end: int) -> bool:
        try:
            self._cache.prepare_write(table, end)
        except CacheExhausted:
            return False
        return True

    def _is_running(self, session: TargetSession) -> bool:
        """Whether a session is within its run and not idle, so that it must not be preempted."""
        is_idle = session.work is None and time.perf_counter() - session.quiet_since_s >= TURNAROUND_S
        return session.table.length < session.guaranteed_length and session not in self.waiting and not is_idle

    def _left(self) -> list[TargetSession]:
        """Returns the sessions with blocks and without work for ABANDONED_S, the one left alone for longest last."""
        since_s = time.perf_counter() - ABANDONED_S
        held = [one for one in self._sessions if one.table.block_ids and one.work is None]
        left = [one for one in held if one.quiet_since_s <= since_s]
        return sorted(left, key=lambda one: one.quiet_since_s, reverse=True)

    def _preempt(self, session: TargetSession) -> None:
        """Frees a session's blocks; its current or next request waits until it is reopened."""
        self.cache_prefix(session)
        length = session.table.length
        self._cache.free(session.table)
        self.counters["preemptions"] += 1
        session.preemptions += 1
        session.holds(0)
        session.feed = None
        if session.work is not None:
            self._wait(session)
        get_logger().info("session preempted", **log_names(session.opened), length=length)

    def _wait(self, session: TargetSession) -> None:
        self.waiting.add(session)
        self._displaced(session)
