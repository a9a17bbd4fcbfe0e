"""The heartbeat of the engine thread: what it does now, and how long that may take.

The engine thread writes it, any thread may read it. It reads no clock: the engine reports how long a step took, and
`specdec.replica.watch` counts the time of the current work.
"""

from __future__ import annotations

from dataclasses import dataclass

USUAL_FACTOR = 8.0  # a step that takes this many times as long as such steps took hangs
STEP_S_MIN = 2.0  # no step hangs before: a busy machine delays short steps by many times their length
UNKNOWN_S = 60.0  # no work without measurement hangs before: the first step of a shape may load or measure kernels
RISE, FADING = 2.0, 0.9  # of the usual time with a step, at most: a step in which the process was stopped says little


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One piece of work of the engine thread, which hangs after `seconds_max`; without rows it is work between steps,
    such as posted functions."""

    seconds_max: float
    row_count: int = 0
    block_count: int = 0

    def __str__(self) -> str:
        if not self.row_count:
            return "work between steps"
        return f"a step of {self.row_count} rows over {self.block_count} cache blocks"


class Heartbeat:
    """`work`: the current piece of work, a new object for each; None while the thread waits for posted functions."""

    def __init__(self) -> None:
        self.work: Work | None = None
        self._usual_s: dict[tuple[int, int], float] = {}  # by rows, and the magnitude of the number of blocks

    def waits(self) -> None:
        """The thread begins to wait for posted functions."""
        self.work = None

    def works(self) -> None:
        """The thread begins work between steps."""
        self.work = Work(UNKNOWN_S)

    def begins_step(self, row_count: int, block_count: int) -> None:
        """The thread begins a step of `row_count` rows of sequences that hold `block_count` blocks."""
        usual_s, seconds_min = self._usual_s.get((row_count, block_count.bit_length())), STEP_S_MIN
        if usual_s is None:
            row_s = min((step_s / rows for (rows, _), step_s in self._usual_s.items()), default=0.0)
            usual_s, seconds_min = row_count * row_s, UNKNOWN_S
        self.work = Work(max(seconds_min, USUAL_FACTOR * usual_s), row_count, block_count)

    def ends_step(self, row_count: int, block_count: int, step_s: float) -> None:
        """The step took `step_s`; work between steps begins."""
        shape = row_count, block_count.bit_length()
        usual_s = self._usual_s.get(shape, step_s)
        self._usual_s[shape] = min(max(step_s, FADING * usual_s), RISE * usual_s)
        self.works()
