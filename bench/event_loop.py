"""The event loop a service runs on, for the parts of a benchmark that stand where a service would."""

from __future__ import annotations

import asyncio


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop of the kind services run on (`specdec.cli.service`): the faster one where there is one."""
    try:
        import uvloop
    except ImportError:  # no such thing for this platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
