"""`specdec target`, `draft`, `coordinator` and `gateway`: one service in this process, until a stop signal.

The service's package, and with it torch or grpc, is imported only here, after the settings passed validation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.errors import ConfigError
from specdec.gateway_settings import GatewaySettings
from specdec.launch import child_events as events
from specdec.launch.ranks import ranks_of_machine
from specdec.rpc.process import postpone_collection
from specdec.streams import say
from specdec.terminal import print_text


def run_target(settings: TargetSettings) -> int:
    """Serves the target model, or runs ranks of it on this machine."""
    if settings.tensor_parallel_size == 1:
        postpone_collection()
    from specdec.target_service.service import run, run_rank

    if settings.tensor_parallel_size == 1:
        return _serve(run(settings, on_ready("target")))
    with ranks_of_machine(settings) as (own, place):
        return _serve(run_rank(own, place, on_ready("target")))


def run_draft(settings: DraftSettings) -> int:
    """Serves the draft model."""
    postpone_collection()
    from specdec.draft_service.service import run

    return _serve(run(settings, on_ready("draft")))


def run_coordinator(settings: CoordinatorSettings) -> int:
    """Serves requests."""
    from specdec.coordinator.service import run

    return _serve(run(settings, on_ready("coordinator")))


def run_gateway(settings: GatewaySettings) -> int:
    """Serves HTTP, or prints a new key."""
    if settings.new_key is not None:
        from specdec.gateway.keys import new_key

        key, line = new_key(settings.new_key)
        print_text(f"key, shown this once:    {key}\nline for the keys' file: {line}")
        return 0
    try:
        from specdec.gateway.service import run
    except ModuleNotFoundError as error:
        raise ConfigError(f"the gateway needs {error.name}: pip install 'specdec[gateway]'") from None

    return _serve(run(settings, on_ready("gateway")))


def on_ready(name: str) -> Callable[[str], None]:
    """Returns a function that reports the service's address to the supervisor, or prints it."""

    def tell(address: str) -> None:
        if not events.report(event="ready", address=address):
            say(f"{name} serves on {address}")

    return tell


def _serve(service: Coroutine[Any, Any, None]) -> int:
    """Runs a service to its end, on uvloop if installed: less CPU for every message."""
    try:
        import uvloop
    except ImportError:  # not available on this platform
        asyncio.run(service)
    else:
        uvloop.run(service)
    return 0
