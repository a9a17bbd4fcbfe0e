"""What a step takes by its rows, measured when the model has loaded, so that the first request is no experiment."""

from __future__ import annotations

import time
from collections.abc import Callable

from specdec.engine.block_table import BlockTable
from specdec.engine.runner import Piece
from specdec.engine.scheduler import Engine
from specdec.errors import CacheExhausted

ROW_COUNTS = (1, 2, 4, 8, 16)
CONTEXT_LENGTH = 64
REPEATS = 3  # the least of them counts: what else the machine does only makes a step longer
BUDGET_S = 1.0  # spent, a row count has one repeat

SamplePiece = Callable[[BlockTable, int, int], Piece]  # (table, context length, rows); no rows: the context itself


def measure_step_times(engine: Engine, positions_max: int, sample: SamplePiece) -> tuple[tuple[int, float], ...]:
    """(rows, seconds) of steps for one session, ascending; none where the cache is too small. Engine thread only."""
    context_length = min(CONTEXT_LENGTH, positions_max // 2)
    row_counts = [count for count in ROW_COUNTS if context_length + count <= positions_max]
    try:
        table = engine.cache.reserve(context_length + ROW_COUNTS[-1])
    except CacheExhausted:
        return ()
    began_s = time.perf_counter()
    found: list[tuple[int, float]] = []
    try:
        engine.run([sample(table, context_length, 0)])
        for row_count in row_counts:
            times_s = []
            while len(times_s) < REPEATS and not (times_s and time.perf_counter() - began_s > BUDGET_S):
                started_s = time.perf_counter()
                engine.run([sample(table, context_length, row_count)])
                times_s.append(time.perf_counter() - started_s)
                if table.length > context_length:
                    engine.cache.truncate(table, context_length)
            found.append((row_count, max(min(times_s), found[-1][1] if found else 0.0)))
    finally:
        engine.cache.release(table)
    return tuple(found)
