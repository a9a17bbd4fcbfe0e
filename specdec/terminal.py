"""Everything that specdec prints for people: the one place that knows what a terminal would take for a command.

Names, labels and texts come from clients, models, peers and files, and may hold escape sequences, which move the
cursor, set the title or hide what was printed. So a character that is no text is shown as `\\uXXXX`, which in JSON
means the same. Colours and bars are specdec's own, and pass.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# C0 without tab and newline, DEL, C1, separators of lines, directional overrides and isolates, halves of surrogates.
NO_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
NO_LINE = re.compile(f"{NO_TEXT.pattern}|[\t\n]")


def printable(text: str) -> str:
    """Returns a text, with its tabs and newlines, whose other control characters are shown as `\\uXXXX`. Idempotent."""
    return NO_TEXT.sub(_shown, text)


def printable_line(text: str) -> str:
    """As `printable`, tabs and newlines included."""
    return NO_LINE.sub(_shown, text)


def _shown(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def print_text(text: str, end: str = "\n") -> None:
    """Prints a text, a command's result, to standard output at once. Raises OSError if it cannot be written."""
    print(printable(text), end=end, flush=True)


def print_exception(kind: type[BaseException], error: BaseException | None, place: TracebackType | None) -> None:
    """Prints the traceback of a defect to standard error: a `sys.excepthook`."""
    print(printable("".join(traceback.format_exception(kind, error, place))), end="", file=sys.stderr, flush=True)


class PlainFormatter(logging.Formatter):
    """Formats the lines of libraries, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def print_defects_as_text() -> None:
    """Has this process print tracebacks that reach its end or that of a thread, and lines of libraries' loggers, as
    everything else; where these have hooks of others, such as a debugger's, they stay."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = print_exception
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _print_of_thread
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PlainFormatter())


def _print_of_thread(found: threading.ExceptHookArgs) -> None:
    if found.exc_type is not SystemExit:  # which ends a thread, and is no defect
        print_exception(found.exc_type, found.exc_value, found.exc_traceback)


def make_console(is_for_errors: bool = False, has_highlights: bool = True) -> Console:
    """Returns a console of rich for tables, bars and sentences on standard output, or on standard error. What it prints
    is text only: brackets in a name are no markup."""
    from rich.console import Console, ConsoleOptions, RenderableType

    class PlainConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Any]:
            for part in super().render(renderable, options):
                yield part if part.control else part._replace(text=printable(part.text))

    return PlainConsole(stderr=is_for_errors, highlight=has_highlights, markup=False, emoji=False)
