"""Plants a bug in a real function, by its name, during a run, and reports how soon it is found."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tests.simulation.schedule import run_seed


@dataclass(frozen=True, slots=True)
class Bug:
    """The function `name` of `owner` becomes `made(the real one)`; `title` names the effect."""

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
class Found:
    """The schedule in which a bug showed, counted from 1 (0: not found), and the problem."""

    bug: Bug
    schedule: int
    problem: str

    @property
    def seed(self) -> int:
        """Of the schedule in which it showed."""
        return self.schedule - 1

    def __str__(self) -> str:
        where = f"schedule {self.schedule:4}" if self.schedule else "not found    "
        return f"{self.bug.title:62} {where}  {self.problem[:90]}"


def hunt(bug: Bug, schedule_count: int, first: int = 0) -> Found:
    """Runs schedules with the bug planted until one shows it: those from seed `first` on, then those before it."""
    with bug.planted():
        for seed in (*range(first, schedule_count), *range(first)):
            problem = run_seed(seed).problem
            if problem:
                return Found(bug, seed + 1, problem)
    return Found(bug, 0, "")


def after(effect: Callable[..., Any]) -> Callable[[Callable], Callable]:
    """The real method, and then `effect(self)`."""

    def made(real: Callable) -> Callable:
        def mutant(self: Any, *arguments: Any) -> Any:
            result = real(self, *arguments)
            effect(self)
            return result

        return mutant

    return made


def instead(other: Callable) -> Callable[[Callable], Callable]:
    """Something else."""
    return lambda real: other


def keeping(name: str, of: Callable[..., Any]) -> Callable[[Callable], Callable]:
    """After the method, attribute `name` of `of(*arguments)` has its value from before."""

    def made(real: Callable) -> Callable:
        def mutant(*arguments: Any) -> Any:
            owner = of(*arguments)
            kept = getattr(owner, name)
            result = real(*arguments)
            setattr(owner, name, kept)
            return result

        return mutant

    return made
