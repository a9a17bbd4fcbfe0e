"""Plants a bug in a real function, by its name, while a run lasts, and says how soon it is found."""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tests.simulation.schedule import run_seed


@dataclass(frozen=True, slots=True)
class Bug:
    """The function `name` of `owner` becomes `made(the real one)`; the title of the bug says what it breaks."""

    title: str
    owner: Any
    name: str
    made: Callable[[Callable], Callable]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug, for as long as the block lasts. Raises AttributeError where there is no such function."""
        found = inspect.getattr_static(self.owner, self.name)
        mutant = self.made(getattr(found, "__func__", found))
        with patch.object(self.owner, self.name, staticmethod(mutant) if isinstance(found, staticmethod) else mutant):
            yield


@dataclass(frozen=True, slots=True)
class SourceBug:
    """`old` becomes `new` in the function `name` of `owner`; the name of the bug says what it breaks."""

    title: str
    owner: Any
    name: str
    old: str
    new: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug, for as long as the block lasts. Raises ValueError where the source has no such text."""
        with patch.object(self.owner, self.name, self.wrapped(self.mutant())):
            yield

    def wrapped(self, mutant: Callable) -> Any:
        """A property or static method stays one."""
        found = inspect.getattr_static(self.owner, self.name)
        if isinstance(found, property):
            return property(mutant)
        return staticmethod(mutant) if isinstance(found, staticmethod) else mutant

    def mutant(self) -> Callable:
        """The function with the bug in it, compiled where the real one lives."""
        found = inspect.getattr_static(self.owner, self.name)
        real = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        source = textwrap.dedent(inspect.getsource(real))
        if source.count(self.old) != 1:
            raise ValueError(f"{self.title}: {self.old!r} stands {source.count(self.old)} times in {self.name}")
        source = source.replace(self.old, self.new)
        lines = source.splitlines(keepends=True)
        while lines[0].startswith("@"):
            lines.pop(0)
        names = sys.modules[real.__module__].__dict__
        code = compile("".join(lines), f"<{self.title}>", "exec", __future__.annotations.compiler_flag)
        made: dict[str, Any] = {}
        exec(code, names, made)
        return made[self.name]


@dataclass(frozen=True, slots=True)
class Found:
    """How a bug showed: in which schedule, counted from 1, as what; 0 where it did not."""

    bug: Bug | SourceBug
    schedule: int
    problem: str

    @property
    def seed(self) -> int:
        """Of the schedule in which it showed."""
        return self.schedule - 1

    def __str__(self) -> str:
        where = f"schedule {self.schedule:4}" if self.schedule else "not found    "
        return f"{self.bug.title:62} {where}  {self.problem[:90]}"


def hunt(bug: Bug | SourceBug, schedule_count: int) -> Found:
    """Runs schedules with the bug planted until one shows it."""
    with bug.planted():
        for seed in range(schedule_count):
            problem = run_seed(seed).problem
            if problem:
                return Found(bug, seed + 1, problem)
    return Found(bug, 0, "")
