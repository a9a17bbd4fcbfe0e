"""`specdec serve`: the three services on this machine, started in order and stopped together.

Target and draft load at the same time, are held against each other, and only then the coordinator starts. Losing the
draft costs speed and is reported; losing one of the others ends all.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from specdec.cli.processes import KILL_GRACE_S, Child, start, stop_all, wait_all_ready
from specdec.config import ServeSettings, TlsSettings
from specdec.errors import Mismatch, ReplicaUnavailable
from specdec.protocol.types import Description

POLL_S = 0.2
LOADING_S_MAX = 3600.0  # the largest models come over a network
DESCRIBE_TIMEOUT_S = 10.0
PLAIN = TlsSettings(insecure=True)


def serve(settings: ServeSettings) -> int:
    """Runs until interrupted; returns the exit code. Raises SpecdecError when a service cannot start or is lost."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    children: list[Child] = []
    try:
        with _waiting("loading target and draft"):
            coordinator, target, draft, sizes = _start(settings, children)
        print(f"specdec serves {settings.served_model_name or settings.model} on {coordinator.address}", flush=True)
        print(f"target on {target.address}, draft on {draft.address}; Ctrl-C stops all three", flush=True)
        print("\n".join(sizes), flush=True)
        _watch(coordinator, target, draft)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        stop_all(reversed(children), settings.drain_grace_s + KILL_GRACE_S)


def _start(settings: ServeSettings, children: list[Child]) -> tuple[Child, Child, Child, list[str]]:
    """Starts all three; each is in `children` as soon as it exists, so that whoever stops them sees it. Says with them
    how large their caches are."""
    from specdec.rpc.server import check_port

    check_port(settings.host, settings.port)  # before two models are loaded in vain
    target = start("target", settings.target_settings())
    children.append(target)
    draft = start("draft", settings.draft_settings())
    children.append(draft)
    wait_all_ready((target, draft), LOADING_S_MAX)
    described = asyncio.run(check_match(settings, target.address, draft.address))
    sizes = [f"{name}'s cache: {own.cache.sentence(own.positions_max)}" for name, own in described.items() if own.cache]
    coordinator = start("coordinator", settings.coordinator_settings(target.address, draft.address))
    children.append(coordinator)
    coordinator.wait_ready()
    return coordinator, target, draft, sizes


async def check_match(settings: ServeSettings, target_address: str, draft_address: str) -> dict[str, Description]:
    """What the two say they serve, by name. Raises Mismatch, naming both models, unless they have one tokenizer."""
    from specdec.rpc.client import call_unary, open_channel
    from specdec.rpc.convert import description_from_message
    from specdec.v1 import types_pb2 as types_pb

    found: dict[str, Description] = {}
    for name, service, address in (
        ("target", "TargetService", target_address),
        ("draft", "DraftService", draft_address),
    ):
        async with open_channel(address, PLAIN) as channel:
            method = f"/specdec.v1.{service}/Describe"
            request = types_pb.DescribeRequest()
            answer = await call_unary(channel, method, request, types_pb.DescribeResponse, DESCRIBE_TIMEOUT_S)
            found[name] = description_from_message(answer)
    fingerprints = found["target"].tokenizer_fingerprint, found["draft"].tokenizer_fingerprint
    if fingerprints[0] != fingerprints[1]:
        raise Mismatch(
            f"draft {settings.draft_model} and target {settings.model} have different tokenizers (fingerprints "
            f"{fingerprints[1][:12]} and {fingerprints[0][:12]}); choose a draft with the target's tokenizer"
        )
    return found


def _watch(coordinator: Child, target: Child, draft: Child) -> None:
    """Returns never: raises ReplicaUnavailable when target or coordinator ended. A lost draft costs speed only."""
    is_draft_reported = False
    while True:
        time.sleep(POLL_S)
        for child in (coordinator, target):
            if not child.is_running:
                raise ReplicaUnavailable(f"the {child.command} service ended with code {child.process.returncode}")
        if not draft.is_running and not is_draft_reported:
            is_draft_reported = True
            message = f"the draft service ended with code {draft.process.returncode}; texts go on without speculation"
            print(f"specdec: {message}", file=sys.stderr, flush=True)


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """Shows that something is going on, to people only."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
