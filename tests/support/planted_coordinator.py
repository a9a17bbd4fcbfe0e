"""A coordinator with a planted fault: `Describe` hangs in the event loop. For tests of the watch over a process.

Run as `python -m tests.support.planted_coordinator TARGET TOKENIZER` it prints its address when it serves.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import NoReturn

from specdec import process_watch
from specdec.config import CoordinatorSettings
from specdec.coordinator.service import Coordinator, run

HELD_S_MAX = 2.0


async def hang(*_: object) -> NoReturn:
    """Sleeps in the event loop, as a defect would that waits where it should await: other threads still run."""
    while True:
        time.sleep(1.0)


if __name__ == "__main__":
    process_watch.HELD_S_MAX = HELD_S_MAX
    Coordinator.describe = hang
    settings = CoordinatorSettings(port=0, target=sys.argv[1], tokenizer=sys.argv[2])
    asyncio.run(run(settings, lambda address: print(address, flush=True)))
