"""Progress of long work, shown to people only: on a terminal a bar, elsewhere nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def loading_bar(title: str) -> Iterator[Callable[[str, float], None]]:
    """Yields `progress(what, share)`, share from 0 to 1."""
    if not sys.stderr.isatty():
        yield lambda what, share: None
        return
    from rich.console import Console

    columns = (TextColumn(title), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
