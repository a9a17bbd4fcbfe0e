"""Rates of what a peer sends: beyond one it is served later, so it waits and holds nothing here. Only
wasted calls, which nothing can be done for, have a rate beyond which their connection is to be closed.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from specdec.errors import CacheExhausted
from specdec.rpc.limits import (
    CALL_BURST_S,
    CALLS_PER_S_MAX,
    CONNECTION_COUNT_MAX,
    MESSAGES_PER_S_MAX,
    WAITING_CALL_COUNT_MAX,
    WASTED_CALLS_PER_S_FREE,
    WASTED_CALLS_PER_S_MAX,
)

Known = TypeVar("Known")


class Rate:
    """`per_s` events a second, and as many at once as are due in `burst_s` (generic cell rate algorithm)."""

    def __init__(self, per_s: float, burst_s: float = 1.0) -> None:
        self._interval_s, self._burst_s = 1 / per_s, burst_s
        self._due_s = 0.0  # the time at which a peer that never paused would send its next event

    def wait_s(self, now_s: float, share_count: int = 1) -> float:
        """Counts one event at a `share_count`th of the rate; returns the time after which it conforms, 0 within it."""
        wait_s = max(0.0, self._due_s - now_s - self._burst_s)
        self._due_s = max(self._due_s, now_s) + share_count * self._interval_s
        return wait_s

    def conforms(self, now_s: float) -> bool:
        """Counts one event if it is within the rate; returns whether it is."""
        is_within = self._due_s - now_s <= self._burst_s
        if is_within:
            self.wait_s(now_s)
        return is_within

    async def admit(self) -> None:
        """Counts one event and waits until it conforms."""
        if wait_s := self.wait_s(time.monotonic()):
            await asyncio.sleep(wait_s)


def message_rate() -> Rate:
    """Returns the rate of the messages that one stream or link receives."""
    return Rate(MESSAGES_PER_S_MAX)


@dataclass(slots=True)
class Caller:
    """One connection: the rate of its calls, that of the wasted ones which its host is not charged with, and the calls
    that wait, all and those that wait for their turn."""

    turns: Rate = field(default_factory=lambda: Rate(CALLS_PER_S_MAX, CALL_BURST_S))
    free_waste: Rate = field(default_factory=lambda: Rate(WASTED_CALLS_PER_S_FREE))
    waiting_count: int = 0
    queued_count: int = 0
    is_closing: bool = False


class CallRates:
    """The calls of a server: CALLS_PER_S_MAX turns a second, shared equally by the connections that wait for one, and
    WAITING_CALL_COUNT_MAX places to wait, shared by those that have any. Of wasted calls, WASTED_CALLS_PER_S_MAX of a
    host, as a connection that is closed for them is soon replaced. It remembers as many connections and hosts as a port
    may have connections. A peer is named as by gRPC: `ipv4:HOST:PORT`.
    """

    def __init__(self) -> None:
        self._callers: OrderedDict[str, Caller] = OrderedDict()
        self._wasted: OrderedDict[str, Rate] = OrderedDict()
        self._waiting_count = self._waiting_caller_count = self._queued_caller_count = 0

    @contextmanager
    def place(self, peer: str) -> Iterator[Caller]:
        """Gives a call a place to wait. Raises CacheExhausted if all are taken and its connection has its share."""
        caller = self._caller(peer)
        is_full = self._waiting_count >= WAITING_CALL_COUNT_MAX
        if is_full and caller.waiting_count * self._waiting_caller_count >= WAITING_CALL_COUNT_MAX:
            count = f"{caller.waiting_count} of the {self._waiting_count} calls that wait here"
            raise CacheExhausted(f"{count} are of this connection, more than its share")
        self._waiting_count += 1
        self._waiting_caller_count += not caller.waiting_count
        caller.waiting_count += 1
        try:
            yield caller
        finally:
            self._waiting_count -= 1
            caller.waiting_count -= 1
            self._waiting_caller_count -= not caller.waiting_count

    async def turn(self, caller: Caller) -> None:
        """Counts a call and returns when it is its turn."""
        share_count = self._queued_caller_count + (not caller.queued_count)
        wait_s = caller.turns.wait_s(time.monotonic(), share_count)
        if not wait_s:
            return
        self._queued_caller_count += not caller.queued_count
        caller.queued_count += 1
        try:
            await asyncio.sleep(wait_s)
        finally:
            caller.queued_count -= 1
            self._queued_caller_count -= not caller.queued_count

    def must_close(self, peer: str, now_s: float) -> bool:
        """Counts a wasted call; returns whether the connection is to be closed for it, once: its other calls end then,
        and are wasted too."""
        caller = self._caller(peer)
        if caller.is_closing or caller.free_waste.conforms(now_s):
            return False
        rate = _remembered(self._wasted, _host(peer), lambda: Rate(WASTED_CALLS_PER_S_MAX))
        caller.is_closing = not rate.conforms(now_s)
        return caller.is_closing

    def _caller(self, peer: str) -> Caller:
        return _remembered(self._callers, peer, Caller)


def _remembered(known: OrderedDict[str, Known], name: str, make: Callable[[], Known]) -> Known:
    """Returns what is known of a name, made if nothing is; the names used longest ago are forgotten."""
    if name not in known:
        known[name] = make()
        if len(known) > CONNECTION_COUNT_MAX:
            known.popitem(last=False)
    known.move_to_end(name)
    return known[name]


def _host(peer: str) -> str:
    """Returns a peer without its port."""
    return peer.rpartition(":")[0]
