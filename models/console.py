"""Shared by the commands of the recipe: progress bars on standard error, and errors of the operator as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specdec.errors import ConfigError

Item = TypeVar("Item")


def progress_bar() -> Progress:
    """A bar with a count, the remaining time and a free text `note`; silent when standard error is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal)


@contextmanager
def progress_over(items: Sequence[Item], description: str) -> Iterator[Iterator[Item]]:
    """An iterator over the items that moves a bar."""
    with progress_bar() as bar:
        task = bar.add_task(description, total=len(items), note="")

        def shown() -> Iterator[Item]:
            for item in items:
                yield item
                bar.advance(task)

        yield shown()


def run_command(main: Callable[[], None]) -> None:
    """Runs a command; an error the operator can mend becomes one line and exit code 1."""
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error}")
