"""Rates of what a peer sends: beyond one it is not refused but served later, so it waits and holds nothing here."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from specdec.rpc.limits import CALLS_PER_S_MAX, CONNECTION_COUNT_MAX, MESSAGES_PER_S_MAX


class Rate:
    """`per_s` events a second, and as many at once after a second without any (generic cell rate algorithm)."""

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1 / per_s
        self._due_s = 0.0  # the time at which a peer that never paused would send its next event

    def wait_s(self, now_s: float) -> float:
        """Counts one event; returns the time after which it conforms, 0 within the rate."""
        wait_s = max(0.0, self._due_s - now_s - 1.0)
        self._due_s = max(self._due_s, now_s) + self._interval_s
        return wait_s

    async def admit(self) -> None:
        """Counts one event and waits until it conforms."""
        if wait_s := self.wait_s(time.monotonic()):
            await asyncio.sleep(wait_s)


def message_rate() -> Rate:
    """Returns the rate of the messages that one stream or link receives."""
    return Rate(MESSAGES_PER_S_MAX)


class CallRates:
    """The rate of calls of every connection, by the peer's address. It remembers as many as a server may have."""

    def __init__(self) -> None:
        self._rates: OrderedDict[str, Rate] = OrderedDict()

    async def admit(self, peer: str) -> None:
        """Counts a call of the connection and waits until it conforms."""
        rate = self._rates.get(peer)
        if rate is None:
            rate = self._rates[peer] = Rate(CALLS_PER_S_MAX)
            if len(self._rates) > CONNECTION_COUNT_MAX:
                self._rates.popitem(last=False)
        self._rates.move_to_end(peer)
        await rate.admit()
