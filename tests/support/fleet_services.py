"""A fleet of real processes on free loopback ports: targets, drafts and coordinators that can be killed and replaced.

The members stand in files that the coordinators watch, so they change while these run.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.launch.children import Child, start, stop_all, wait_all_ready
from tests.support.services import Client
from tests.support.waiting import until

COMMON: dict[str, Any] = {"port": 0, "log_level": "error", "drain_grace_s": 1.0}


@dataclass
class FleetServices:
    """Running services. `folder`: of the files of members."""

    folder: Path
    target_model: Path
    draft_model: Path
    target_settings: dict[str, Any]
    draft_settings: dict[str, Any]
    coordinator_settings: dict[str, Any]
    targets: list[Child] = field(default_factory=list)
    drafts: list[Child] = field(default_factory=list)
    coordinators: list[Child] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    def begin_target(self, **own: Any) -> Child:
        """Starts a further target, which is no member yet."""
        values = {**COMMON, "model": str(self.target_model), **self.target_settings, **own}
        self.targets.append(start("target", TargetSettings(**values)))
        return self.targets[-1]

    def begin_draft(self, **own: Any) -> Child:
        """Starts a further draft, which is no member yet."""
        told = {"model": str(self.draft_model), "target_tokenizer": str(self.target_model)}
        self.drafts.append(start("draft", DraftSettings(**{**COMMON, **told, **self.draft_settings, **own})))
        return self.drafts[-1]

    def list_members(self, targets: list[Child] | None = None, drafts: list[Child] | None = None) -> None:
        """These are the members of the pools from now on; by default all that were started."""
        for name, children in (("targets", targets or self.targets), ("drafts", drafts or self.drafts)):
            new = self.folder / f"{name}.new"
            new.write_text("".join(f"{child.address}\n" for child in children))
            new.rename(self.folder / name)

    def begin_coordinator(self) -> Client:
        """Starts a coordinator of the members, waits until it is ready, and returns a client of it."""
        members = {"target": (f"@{self.folder / 'targets'}",), "draft": (f"@{self.folder / 'drafts'}",)}
        own = {**COMMON, "tokenizer": str(self.target_model), "speculation_policy": "fixed", "draft_wait_ms": 2000.0}
        settings = CoordinatorSettings(**{**own, **members, **self.coordinator_settings})
        child = start("coordinator", settings)
        self.coordinators.append(child)
        child.wait_ready()
        self.clients.append(Client(child.address))
        return self.clients[-1]

    def wait_for(self, client: Client, target_count: int, draft_count: int) -> None:
        """Returns once a coordinator uses this number of replicas. Raises TimeoutError."""

        def is_whole() -> bool:
            said = client.described()
            counts = [sum(group.num_replicas for group in groups) for groups in (said.targets, said.drafts)]
            return counts == [target_count, draft_count]

        until(is_whole, timeout_s=60.0)

    def kill(self, child: Child) -> None:
        """Kills a process, as by the system's memory killer."""
        child.process.send_signal(signal.SIGKILL)
        child.process.wait()


@contextlib.contextmanager
def running_fleet(
    folder: Path,
    target_model: Path,
    draft_model: Path,
    counts: tuple[int, int, int] = (2, 1, 1),
    target: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    coordinator: dict[str, Any] | None = None,
) -> Iterator[FleetServices]:
    """Starts `counts` targets, drafts and coordinators, with settings of each kind, and stops all at the end."""
    services = FleetServices(folder, target_model, draft_model, target or {}, draft or {}, coordinator or {})
    try:
        for _ in range(counts[0]):
            services.begin_target()
        for _ in range(counts[1]):
            services.begin_draft()
        wait_all_ready([*services.targets, *services.drafts])
        services.list_members()
        for _ in range(counts[2]):
            services.wait_for(services.begin_coordinator(), counts[0], counts[1])
        yield services
    finally:
        for client in services.clients:
            client.close()
        stop_all([*services.coordinators, *services.drafts, *services.targets])
