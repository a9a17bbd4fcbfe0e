"""`specdec serve`: the three services on this machine, started in order and stopped together.

Target and draft load at the same time, their tokenizers are compared, then the coordinator starts. A service that ends
is reported and restarted (`specdec.launch.supervisor`).
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from specdec.config import ServeSettings, TlsSettings
from specdec.errors import Mismatch
from specdec.folders import local_folder
from specdec.launch.children import KILL_GRACE_S, LOADING_S_MAX, Child, start, stop_all, wait_all_ready
from specdec.launch.supervisor import Keeper
from specdec.protocol.types import Description
from specdec.settings import ServiceSettings
from specdec.streams import say
from specdec.terminal import make_console

POLL_S = 0.2
DESCRIBE_TIMEOUT_S = 10.0
INSECURE = TlsSettings(insecure=True)


def serve(settings: ServeSettings) -> int:
    """Runs until interrupted; returns the exit code. Raises SpecdecError when a service cannot start or is lost."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    children: list[Child] = []
    try:
        with running(settings, children) as (coordinator, target, draft, sizes):
            say(f"specdec serves {settings.served_model_name or settings.model} on {coordinator.address}")
            where = f"draft on {draft.address}" if draft is not None else "no draft"
            say(f"target on {target.address}, {where}; Ctrl-C stops all")
            say("\n".join(sizes))
            _watch(settings, children)
        return 1
    except KeyboardInterrupt:
        return 0


@contextmanager
def running(settings: ServeSettings, children: list[Child]) -> Iterator[tuple[Child, Child, Child | None, list[str]]]:
    """Yields coordinator, target, draft (None without one), and the size of each cache as text. At the end it stops all
    `children`, a list that it fills. Raises SpecdecError when a service cannot start."""
    from specdec.engine.loading.model_folder import open_with_bar
    from specdec.rpc.ports import check_port

    check_port(settings.host, settings.port)  # before two models are loaded
    if not local_folder(settings.model).is_dir():
        open_with_bar(settings.model)  # fetched or converted once: target and draft both read its tokenizer
    names = "target and draft" if settings.has_draft else "the target"
    try:
        waiting = make_console(is_for_errors=True).status(f"loading {names}") if sys.stderr.isatty() else nullcontext()
        with waiting:  # shows activity, on a terminal only
            started = _start(settings, children)
        yield started
    finally:
        stop_all(reversed(children), settings.drain_grace_s + KILL_GRACE_S)


def _start(settings: ServeSettings, children: list[Child]) -> tuple[Child, Child, Child | None, list[str]]:
    """Starts the services; each is in `children` as soon as it exists, so that `running` can stop it. Returns them and
    the sizes of their caches."""
    target = start("target", settings.target_settings())
    children.append(target)
    draft = start("draft", settings.draft_settings()) if settings.has_draft else None
    if draft is not None:
        children.append(draft)
    wait_all_ready(tuple(children), LOADING_S_MAX)
    draft_address = None if draft is None else draft.address
    described = asyncio.run(check_match(settings, target.address, draft_address))
    sizes = [f"{name}'s cache: {own.cache.sentence(own.positions_max)}" for name, own in described.items() if own.cache]
    sizes += [own.draft_vocabulary_sentence for own in described.values() if own.draft_vocabulary_sentence]
    coordinator = start("coordinator", settings.coordinator_settings(target.address, draft_address))
    children.append(coordinator)
    coordinator.wait_ready()
    return coordinator, target, draft, sizes


async def check_match(
    settings: ServeSettings, target_address: str, draft_address: str | None
) -> dict[str, Description]:
    """Returns the descriptions by name. Raises Mismatch with both models unless their tokenizers are equal."""
    from specdec.rpc.client import call_unary, open_channel
    from specdec.rpc.convert import description_from_message
    from specdec.v1 import types_pb2 as types_pb

    found: dict[str, Description] = {}
    for name, service, address in (
        ("target", "TargetService", target_address),
        ("draft", "DraftService", draft_address),
    ):
        if address is None:
            continue
        async with open_channel(address, INSECURE) as channel:
            method = f"/specdec.v1.{service}/Describe"
            request = types_pb.DescribeRequest()
            answer = await call_unary(channel, method, request, types_pb.DescribeResponse, DESCRIBE_TIMEOUT_S)
            found[name] = description_from_message(answer)
    fingerprints = [own.tokenizer_fingerprint for own in found.values()]
    if len({*fingerprints}) > 1:
        raise Mismatch(
            f"draft {settings.draft_model} and target {settings.model} have different tokenizers (fingerprints "
            f"{fingerprints[1][:12]} and {fingerprints[0][:12]}); choose a draft with the target's tokenizer"
        )
    return found


def _watch(settings: ServeSettings, children: list[Child]) -> None:
    """Restarts every service that ends. Never returns: raises ReplicaUnavailable when target or coordinator is given
    up."""
    replicas = children[:-1]
    target, draft = replicas[0].address, replicas[1].address if settings.has_draft else None
    own: list[ServiceSettings] = [settings.target_settings(), settings.coordinator_settings(target, draft)]
    if settings.has_draft:
        own.insert(1, settings.draft_settings())
    keepers = [Keeper(children, index, service) for index, service in enumerate(own)]
    while True:
        time.sleep(POLL_S)
        for keeper in keepers:
            keeper.look(time.monotonic())
