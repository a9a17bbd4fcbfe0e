"""`specdec serve`: the three services on this machine, started in order and stopped together.

Target and draft load at the same time, their tokenizers are compared, then the coordinator starts. A lost draft costs
only speed: it is reported and restarted, a limited number of times. A lost target or coordinator ends all.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console

from specdec.cli.processes import KILL_GRACE_S, Child, start, stop_all, wait_all_ready
from specdec.config import DraftSettings, ServeSettings, TlsSettings, split_address
from specdec.errors import ConfigError, Mismatch, ReplicaUnavailable
from specdec.protocol.types import Description

POLL_S = 0.2
LOADING_S_MAX = 3600.0  # the largest models come over a network
DESCRIBE_TIMEOUT_S = 10.0
RESTART_WAIT_S, RESTART_WAIT_S_MAX = 1.0, 60.0  # before a lost draft is restarted: doubled each time
RESTART_COUNT_MAX = 6  # in a row: about two minutes, for a temporary lack of memory
STEADY_S = 300.0
INSECURE = TlsSettings(insecure=True)


def serve(settings: ServeSettings) -> int:
    """Runs until interrupted; returns the exit code. Raises SpecdecError when a service cannot start or is lost."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    children: list[Child] = []
    try:
        with running(settings, children) as (coordinator, target, draft, sizes):
            print(f"specdec serves {settings.served_model_name or settings.model} on {coordinator.address}", flush=True)
            print(f"target on {target.address}, draft on {draft.address}; Ctrl-C stops all three", flush=True)
            print("\n".join(sizes), flush=True)
            _watch(settings, coordinator, target, children)
        return 1
    except KeyboardInterrupt:
        return 0


@contextmanager
def running(settings: ServeSettings, children: list[Child]) -> Iterator[tuple[Child, Child, Child, list[str]]]:
    """Yields coordinator, target, draft, and the size of each cache as text. At the end it stops all `children`, a list
    that it fills. Raises SpecdecError when a service cannot start."""
    try:
        waiting = Console(stderr=True).status("loading target and draft") if sys.stderr.isatty() else nullcontext()
        with waiting:  # shows activity, on a terminal only
            started = _start(settings, children)
        yield started
    finally:
        stop_all(reversed(children), settings.drain_grace_s + KILL_GRACE_S)


def _start(settings: ServeSettings, children: list[Child]) -> tuple[Child, Child, Child, list[str]]:
    """Starts all three; each is in `children` as soon as it exists, so that `running` can stop it. Returns them and the
    sizes of their caches."""
    from specdec.rpc.ports import check_port

    check_port(settings.host, settings.port)  # before two models are loaded
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
    """Returns both descriptions by name. Raises Mismatch with both models unless their tokenizers are equal."""
    from specdec.rpc.client import call_unary, open_channel
    from specdec.rpc.convert import description_from_message
    from specdec.v1 import types_pb2 as types_pb

    found: dict[str, Description] = {}
    for name, service, address in (
        ("target", "TargetService", target_address),
        ("draft", "DraftService", draft_address),
    ):
        async with open_channel(address, INSECURE) as channel:
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


def _watch(settings: ServeSettings, coordinator: Child, target: Child, children: list[Child]) -> None:
    """Never returns: raises ReplicaUnavailable when target or coordinator ended. Restarts a lost draft."""
    keeper = DraftKeeper(settings.draft_settings(), children)
    while True:
        time.sleep(POLL_S)
        for child in (coordinator, target):
            if not child.is_running:
                raise ReplicaUnavailable(f"the {child.command} service ended with code {child.process.returncode}")
        keeper.look(time.monotonic())


class DraftKeeper:
    """Restarts a lost draft on its port, where the coordinator reconnects.

    The wait grows with each restart, and it gives up after RESTART_COUNT_MAX restarts; the count is reset once a draft
    has run for STEADY_S. `children` always holds the current draft at the same index.
    """

    def __init__(self, settings: DraftSettings, children: list[Child]) -> None:
        self._children = children
        self._place = next(index for index, child in enumerate(children) if child.command == "draft")
        port = split_address(self._draft.address)[1]
        self._settings = settings.model_copy(update={"port": port})
        self._restart_count = 0
        self._due_s: float | None = None  # time of the restart; None: it runs, or was given up
        self._started_s = time.monotonic()
        self._is_given_up = False

    @property
    def _draft(self) -> Child:
        return self._children[self._place]

    def look(self, now_s: float) -> None:
        """Checks and restarts the draft. Call it often, in the thread that started the children; it does not block."""
        if self._is_given_up:
            return
        if self._due_s is not None:
            if now_s >= self._due_s:
                self._start(now_s)
        elif not self._draft.is_running:
            self._plan(now_s)
        elif not self._draft.address and self._hears():
            _say("the draft service is back")

    def _hears(self) -> bool:
        try:
            return self._draft.check_ready(0.0)
        except ConfigError as error:  # it ended; the next check detects that too
            _say(str(error))
            return False

    def _plan(self, now_s: float) -> None:
        ended = f"the draft service ended with code {self._draft.process.returncode}; texts go on without speculation"
        if now_s - self._started_s >= STEADY_S:
            self._restart_count = 0
        self._is_given_up = self._restart_count >= RESTART_COUNT_MAX
        if self._is_given_up:
            _say(f"{ended}; it was started again {self._restart_count} times and is given up")
            return
        wait_s = min(RESTART_WAIT_S * 2**self._restart_count, RESTART_WAIT_S_MAX)
        _say(f"{ended}; it is started again in {wait_s:g} s")
        self._due_s = now_s + wait_s

    def _start(self, now_s: float) -> None:
        self._draft.stop(0.0)
        self._due_s, self._started_s = None, now_s
        self._restart_count += 1
        self._children[self._place] = start("draft", self._settings)


def _say(sentence: str) -> None:
    print(f"specdec: {sentence}", file=sys.stderr, flush=True)
