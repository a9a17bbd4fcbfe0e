"""Signals of a service process."""

from __future__ import annotations

import asyncio
import signal


async def until_told_to_stop() -> None:
    """Returns on SIGTERM or SIGINT. A second signal ends the process the ordinary way."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, told.set)
    try:
        await told.wait()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
