"""The Dockerfile as values: its stages, with their files from the repository, their variables and commands."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePosixPath

from tests.hygiene.sources import ROOT

IMAGE_ROOT = "/opt/specdec"  # where images keep what they copy
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


@dataclass(slots=True)
class Stage:
    """One stage, with the parts of its base stage. `copies`: (source, destination) from the repository; `taken`:
    (stage, source, destination) from another stage, after those; `commands`: its own."""

    name: str
    base: str
    copies: list[tuple[str, str]] = field(default_factory=list)
    taken: list[tuple[str, str, str]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    user: str = ""

    def holds(self, path: str) -> bool:
        """Whether the image has this file or folder, which the repository has, copied or below what is copied."""
        own = PurePosixPath(path).relative_to(IMAGE_ROOT)
        ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
        return (ROOT / own).exists() and any(
            own.is_relative_to(source) and not any(own.is_relative_to(line) for line in ignored)
            for source, _ in self.copies
        )


@cache
def stages() -> dict[str, Stage]:
    """The stages of deploy/Dockerfile by name."""
    return stages_of(DOCKERFILE.read_text(encoding="utf-8"))


def stages_of(text: str) -> dict[str, Stage]:
    """The stages of a Dockerfile by name."""
    found: dict[str, Stage] = {}
    for instruction, rest in instructions_of(text):
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            parent = found.get(base)
            found[name] = Stage(name, base)
            if parent is not None:
                found[name].copies = list(parent.copies)
                found[name].taken = list(parent.taken)
                found[name].environment = dict(parent.environment)
                found[name].user = parent.user
            stage = found[name]
        elif instruction == "COPY" and rest.startswith("--from="):
            origin, source, destination = rest.removeprefix("--from=").split()
            stage.taken.append((origin, source, destination))
        elif instruction == "COPY":
            *sources, destination = rest.split()
            stage.copies += [(source, destination) for source in sources]
        elif instruction == "RUN":
            stage.commands.append(rest)
        elif instruction == "ENV":
            stage.environment.update(dict(part.split("=", 1) for part in shlex.split(rest)))
        elif instruction == "ENTRYPOINT":
            stage.entrypoint = json.loads(rest)
        elif instruction == "USER":
            stage.user = rest
    return found


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the whole file, continued lines joined."""
    return instructions_of(DOCKERFILE.read_text(encoding="utf-8"))


def instructions_of(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile."""
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split()[0], " ".join(line.split()[1:])) for line in lines]
