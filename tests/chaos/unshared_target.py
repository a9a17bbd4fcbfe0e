"""A target whose prompts run one after another, by age, in steps as large as the engine allows: what the proof of fair
prompts compares the throughput with.

Run as `python -m tests.chaos.unshared_target FOLDER CACHE_BYTES` it prints its address when it serves.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from specdec.config import TargetSettings
from specdec.engine.scheduling import feed as feed_module
from specdec.engine.scheduling.feed import Feed
from specdec.replica import app as app_module
from specdec.target_service.service import run


def by_age(row_count: int, prompts: Sequence[Feed[Any, Any]], chunk_size: int) -> dict[Feed[Any, Any], int]:
    """Rows of a step for the oldest prompts only: the plain way to divide them."""
    counts = {}
    for feed in prompts:
        if row_count:
            counts[feed] = feed.rows_within(row_count, chunk_size)
            row_count -= counts[feed]
    return counts


if __name__ == "__main__":
    feed_module.divide = by_age
    app_module.CPU_PROMPT_ROWS_MAX = None
    settings = TargetSettings(model=sys.argv[1], port=0, threads=1, kv_cache_bytes=int(sys.argv[2]))
    asyncio.run(run(settings, lambda address: print(address, flush=True)))
