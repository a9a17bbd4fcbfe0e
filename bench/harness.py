"""The three services as child processes on free loopback ports, for benchmarks, the demo and the service tests."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.cli.processes import Child, start, stop_all, wait_all_ready
from specdec.config import EMBEDDED_MODELS, CoordinatorSettings, DraftSettings, TargetSettings

TARGET_MODEL, DRAFT_MODEL = EMBEDDED_MODELS / "target", EMBEDDED_MODELS / "draft"


@dataclass(frozen=True, slots=True)
class Services:
    """Running services; `settings` are the coordinator's, so that another one can be started beside it."""

    target: Child
    draft: Child | None
    coordinator: Child
    settings: CoordinatorSettings


def heldout_prompts() -> dict[int, str]:
    """The shipped held-out prompts by id."""
    lines = (EMBEDDED_MODELS / "heldout_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return {entry["id"]: entry["prompt"] for entry in map(json.loads, lines)}


@contextlib.contextmanager
def running(
    target_model: Path = TARGET_MODEL,
    draft_model: Path | None = DRAFT_MODEL,
    coordinator: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    **engine: Any,
) -> Iterator[Services]:
    """Starts the services and stops them at the end, whatever happens. `engine`: settings of both replicas;
    `draft` and `coordinator`: of these alone.

    Raises ConfigError with a service's own sentence when one cannot start.
    """
    children: list[Child] = []
    common: dict[str, Any] = {"port": 0, "log_level": "error", "drain_grace_s": 1.0}
    try:
        target = start("target", TargetSettings(model=str(target_model), **common, **engine))
        children.append(target)
        if draft_model is not None:
            own = {**common, **engine, **(draft or {})}
            children.append(start("draft", DraftSettings(model=str(draft_model), **own)))
        wait_all_ready(children)
        guess = children[1] if draft_model is not None else None
        settings = CoordinatorSettings(
            target=target.address,
            draft=guess.address if guess else None,
            tokenizer=str(target_model),
            **common,
            **(coordinator or {}),
        )
        child = start("coordinator", settings)
        children.append(child)
        child.wait_ready()
        yield Services(target, guess, child, settings)
    finally:
        stop_all(reversed(children))
