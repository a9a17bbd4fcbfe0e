"""A service process: the objects and threads it starts with, and the signals that end it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

# Python's own, but the oldest generation is collected after 20,000 new objects, not 70,000: without those of the
# startup it is small, and its dead trees of draft tokens are megabytes.
COLLECTION_THRESHOLDS = (700, 10, 3)
WORKERS_MAX = 32
WORKER_START_S_MAX = 10.0  # of all; where one cannot start, the others end with the process


def postpone_collection() -> None:
    """Collects no garbage until `set_startup_objects_aside`: imports make few cycles, and collections take a fifth of
    their time."""
    gc.disable()


def set_startup_objects_aside() -> None:
    """Excludes all current objects from garbage collection: call it once, when the process is ready to serve.

    Libraries and a model leave some 400,000 objects behind. Their collection took 0.15 to 0.3 s every few seconds of
    decoding, in which no step ran and no message was answered. The second collection finds next to nothing: Python
    collects its oldest generation only once this has grown by a quarter of what the last such collection left, and a
    quarter of the startup objects would be 100,000 dead ones, which a quiet service gathers for an hour.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    gc.enable()


def start_workers(loop: asyncio.AbstractEventLoop) -> None:
    """Starts all threads that `asyncio.to_thread` ever uses in a loop, as many as Python's own pool has at most.

    Python's starts one whenever a call finds none free. However many requests came, a later one could start another,
    which looks like a leak.
    """
    count = min(WORKERS_MAX, (os.cpu_count() or 1) + 4)
    pool = ThreadPoolExecutor(count, "worker")
    all_run = threading.Barrier(count, timeout=WORKER_START_S_MAX)  # none is free for a second call before
    for _ in range(count):
        pool.submit(all_run.wait)
    loop.set_default_executor(pool)


async def until_stop_requested(stopped: asyncio.Event | None = None) -> None:
    """Returns on SIGTERM or SIGINT, or when `stopped` is set. A second signal has its default effect."""
    loop = asyncio.get_running_loop()
    stopped = stopped or asyncio.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stopped.set)
    try:
        await stopped.wait()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
