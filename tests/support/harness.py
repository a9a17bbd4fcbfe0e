"""The three services as child processes on free loopback ports, for benchmarks and the service tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.config import CoordinatorSettings, DraftSettings, ServiceSettings, TargetSettings
from specdec.folders import EMBEDDED_MODELS
from specdec.folders import heldout_prompts as heldout_prompts
from specdec.launch.children import Child, start, stop_all, wait_all_ready
from tests.support.network.machines import Network

TARGET_MODEL, DRAFT_MODEL = EMBEDDED_MODELS / "target", EMBEDDED_MODELS / "draft"


@dataclass(frozen=True, slots=True)
class Services:
    """Running services; `settings` are the coordinators', so that another one can be started beside them."""

    target: Child
    draft: Child | None
    coordinators: tuple[Child, ...]
    settings: CoordinatorSettings

    @property
    def coordinator(self) -> Child:
        """The first."""
        return self.coordinators[0]


@contextlib.contextmanager
def running(
    target_model: Path = TARGET_MODEL,
    draft_model: Path | None = DRAFT_MODEL,
    coordinator: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    target: dict[str, Any] | None = None,
    network: Network | None = None,
    coordinator_count: int = 1,
    **engine: Any,
) -> Iterator[Services]:
    """Starts the services and stops them at the end, whatever happens. `engine`: settings of both replicas;
    `draft`, `target` and `coordinator`: of these alone. With a network each runs on the machine of its name. Several
    coordinators use the same target and draft, and know nothing of each other.

    Raises ConfigError with a service's own sentence when one cannot start.
    """
    children: list[Child] = []
    common: dict[str, Any] = {"port": 0, "log_level": "error", "drain_grace_s": 1.0}
    own = {
        "coordinator": coordinator or {},
        "draft": {**engine, **(draft or {})},
        "target": {**engine, **(target or {})},
    }

    def begin(role: str, settings: type[ServiceSettings], **values: Any) -> tuple[Child, ServiceSettings]:
        machine = network.machines[role] if network else None
        placed: dict[str, Any] = {"host": machine.address, "insecure": True} if machine else {}
        made = settings(**{**values, **placed, **common, **own[role]})
        with machine.inside() if machine else contextlib.nullcontext():
            children.append(start(role, made))
        return children[-1], made

    def reached(role: str, child: Child) -> str:
        return network.address_from("coordinator", role, child.address) if network else child.address

    try:
        main, _ = begin("target", TargetSettings, model=str(target_model))
        told = {"model": str(draft_model), "target_tokenizer": str(target_model)}
        guess = begin("draft", DraftSettings, **told)[0] if draft_model is not None else None
        wait_all_ready(children)
        addresses = {"target": reached("target", main), "draft": reached("draft", guess) if guess else ()}
        own_values = {"tokenizer": str(target_model), **addresses}
        begun = [begin("coordinator", CoordinatorSettings, **own_values) for _ in range(coordinator_count)]
        wait_all_ready([child for child, _ in begun])
        settings = begun[0][1]
        assert isinstance(settings, CoordinatorSettings)
        yield Services(main, guess, tuple(child for child, _ in begun), settings)
    finally:
        stop_all(reversed(children))
