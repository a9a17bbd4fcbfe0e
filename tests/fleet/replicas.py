"""Targets and drafts of a simulated fleet, and what one coordinator knows of them.

All coordinators see the same reports, which are REPORT_AGE_S old; what a coordinator opened counts until the next
report, as in the product's pools, also if that report is older than the opening.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specdec.protocol.routing import FULL, session_load

if TYPE_CHECKING:
    from tests.fleet.world import Running

PLACES, DRAFT_PLACES = 64, 64
CACHED_BLOCKS = 4000  # of a target: 256,000 tokens
STEP_S, SESSION_STEP_S = 0.002, 0.00025  # of a draft: a step, and how much longer it takes with each session


@dataclass(slots=True, eq=False)
class Replica:
    """A target or draft: its sessions. `running`: the texts of a target; `cached`: its blocks, least recently used
    first."""

    address: str
    places: int
    is_up: bool = True
    session_count: int = 0
    running: dict[Running, None] = field(default_factory=dict)
    cached: dict[bytes, None] = field(default_factory=dict)

    def cached_count(self, digests: list[bytes]) -> int:
        """How many blocks from the first on are in the cache."""
        return next((count for count, digest in enumerate(digests) if digest not in self.cached), len(digests))

    def cache(self, digests: list[bytes]) -> None:
        """Uses these blocks; the least recently used ones make way."""
        for digest in digests:
            self.cached.pop(digest, None)
            self.cached[digest] = None
        while len(self.cached) > CACHED_BLOCKS:
            del self.cached[next(iter(self.cached))]

    def lose(self) -> list[Running]:
        """The process is lost with all it had; returns its texts."""
        lost = list(self.running)
        self.is_up, self.session_count = False, 0
        self.running.clear()
        self.cached.clear()
        return lost


class Reports:
    """The last reports of a pool: sessions of each replica, and what one session adds to a load."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.number = 0
        self.take([0] * len(replicas), replicas)

    def take(self, session_counts: list[int], replicas: list[Replica]) -> None:
        """Takes newer reports."""
        self.number += 1
        self.session_counts = session_counts
        self.loads = [count / replica.places for count, replica in zip(session_counts, replicas)]
        self.session_load = session_load(zip(session_counts, self.loads))


class View:
    """A replica as one coordinator sees it: a candidate of `specdec.protocol.routing`. `network_s`: of a draft."""

    __slots__ = ("_index", "_is_refusing", "_number", "_opened", "_reports", "address", "network_s", "replica")

    def __init__(self, replica: Replica, index: int, reports: Reports, network_s: float = 0.0) -> None:
        self.address, self.replica, self.network_s = replica.address, replica, network_s
        self._index, self._reports = index, reports
        self._number = self._opened = 0
        self._is_refusing = False

    def _renew(self) -> None:
        if self._number != self._reports.number:
            self._number, self._opened, self._is_refusing = self._reports.number, 0, False

    @property
    def load(self) -> float:
        """The last report and the openings since."""
        self._renew()
        return (
            FULL if self._is_refusing else self._reports.loads[self._index] + self._opened * self._reports.session_load
        )

    def open(self) -> None:
        """A session is opened."""
        self._renew()
        self._opened += 1

    def refuse(self) -> None:
        """The replica refused: it counts as full until its next report."""
        self._renew()
        self._is_refusing = True

    def wait_s(self) -> float:
        """Of a draft: its round trip and a step with one session more, by its report and the openings since."""
        self._renew()
        return self.network_s + step_s(self._reports.session_counts[self._index] + self._opened + 1)


def step_s(session_count: int) -> float:
    """Seconds of a draft's step."""
    return STEP_S + SESSION_STEP_S * session_count
