"""Log lines of every process: structlog to standard error, for people on a terminal, as JSON elsewhere.

A line is an event with fields, never a sentence with values pasted in. Fields bound with `bind` (trace id, session)
appear on every line of their task. Prompt and token text never appear: fields with such names are withheld.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from specdec.terminal import printable, printable_line

# Tracebacks without the values of local variables: those hold prompts and texts.
EXCEPTIONS_WITHOUT_VALUES = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)
OWN_MODULES = "specdec"
WITHHELD_FIELDS = frozenset({"prompt", "text", "token_ids", "output_token_ids", "stop", "stop_string"})

get_logger = structlog.get_logger  # `get_logger().info("link up", peer=address)`, even before logs are configured
# Binds fields to every line logged by this task from here on, and by those it starts; it is one request's own.
bind = structlog.contextvars.bind_contextvars


def _withhold(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replaces the texts of users and answers; log lines are kept longer and read by more people than texts."""
    for name in WITHHELD_FIELDS & event.keys():
        event[name] = "(withheld)"
    return event


def _escape(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Shows control characters of texts, such as a client's label, as `\\uXXXX`; of other values the renderer does."""
    return {name: printable_line(value) if isinstance(value, str) else value for name, value in event.items()}


def _write_traceback(stream: TextIO, error: Any) -> None:
    """Writes a traceback without the control characters of its messages."""
    written = io.StringIO()
    structlog.dev.plain_traceback(written, error)
    stream.write(printable(written.getvalue()))


def _escape_delete(_logger: Any, _method: str, line: str) -> str:
    """Shows the only control character that JSON lets through."""
    return printable(line)


class _Forwarding(logging.Handler):
    """Formats the lines of modules that use the standard library's logging, such as the engine's, like all others."""

    def emit(self, record: logging.LogRecord) -> None:
        get_logger(component=record.name).log(record.levelno, record.getMessage(), exc_info=record.exc_info)


def configure_logs(level: str, service: str) -> None:
    """Sets up logging of this process; the last call counts."""
    renderers: list[Any] = [EXCEPTIONS_WITHOUT_VALUES, structlog.processors.JSONRenderer(default=str), _escape_delete]
    if sys.stderr.isatty():
        renderers = [_escape, structlog.dev.ConsoleRenderer(exception_formatter=_write_traceback)]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            lambda _logger, _method, event: {**event, "service": service},  # of every thread: bound fields are of one
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _withhold,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    own = logging.getLogger(OWN_MODULES)
    own.handlers = [_Forwarding()]
    own.setLevel(level.upper())
