"""Progress of long work, for people only: on a terminal a bar, elsewhere nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from specdec.terminal import make_console


def is_watched() -> bool:
    """Whether standard error is a terminal with this process in front; a supervised child leaves it to its parent."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


@contextmanager
def loading_bar(title: str) -> Iterator[Callable[[str, float], None]]:
    """Yields `progress(what, share)`, share from 0 to 1."""
    columns = (
        TextColumn("{task.fields[title]}", markup=False),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=make_console(is_for_errors=True), transient=True, disable=not is_watched()) as bar:
        task = bar.add_task("", total=1.0, title=title)
        yield lambda what, share: bar.update(task, description=what, completed=share)
