"""What a replica counts of its engine's steps, and what its handler says of sessions when it is asked.

Steps are counted on the engine thread, one addition each; everything is read from other threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.engine.scheduler import Engine
from specdec.protocol.items import Failure
from specdec.rpc.status import REASONS
from specdec.telemetry.metrics import COUNT_BOUNDS, STEP_BOUNDS_S, Histogram


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """Sessions a replica holds, how many of them wait for room in the cache, and how many it takes at most."""

    held: int
    waiting: int
    most: int


@dataclass(slots=True)
class ReplicaFigures:
    """The figures of one replica process."""

    step_time: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    step_rows: Histogram = field(default_factory=lambda: Histogram(COUNT_BOUNDS))
    step_sessions: Histogram = field(default_factory=lambda: Histogram(COUNT_BOUNDS))
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))

    def stepped(self, row_count: int, session_count: int, step_s: float) -> None:
        """The engine ran a step."""
        self.step_time.add(step_s)
        self.step_rows.add(row_count)
        self.step_sessions.add(session_count)

    def failed(self, failure: Failure) -> None:
        """An item of a coordinator could not be done."""
        self.failures[failure.reason] = self.failures.get(failure.reason, 0) + 1


@dataclass(frozen=True, slots=True)
class CacheBlocks:
    """Blocks of the cache: `held` by sessions or promised to them, `kept` for whoever begins alike, `free`."""

    held: int
    kept: int
    free: int

    @staticmethod
    def of(engine: Engine) -> CacheBlocks:
        """As things stand; from another thread than the engine's, each figure on its own is right."""
        cache = engine.cache
        usable_count, kept_count, open_count = cache.block_count - 1, cache.kept_block_count, cache.free_block_count
        free_count = max(0, open_count - kept_count)
        return CacheBlocks(usable_count - free_count - min(kept_count, open_count), kept_count, free_count)

    @property
    def usage(self) -> float:
        """Share that is held, 0 to 1."""
        return self.held / (self.held + self.kept + self.free)
