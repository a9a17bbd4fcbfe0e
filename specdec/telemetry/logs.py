"""Log lines of every process: structlog to standard error, for people on a terminal, as JSON elsewhere.

A line is an event with fields, never a sentence with values pasted in. Fields bound with `bind` (trace id, session)
appear on every line of their task. Prompt and token text never appear: fields with such names are withheld.

A line never raises and never waits: a thread writes it, and what cannot be formatted or written is lost and counted.
That holds for everything that Python writes to standard error: warnings, libraries' lines, uncaught exceptions.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

from specdec.telemetry.background_writer import BackgroundWriter
from specdec.terminal import printable, printable_line

# Tracebacks without the values of local variables: those hold prompts and texts.
EXCEPTIONS_WITHOUT_VALUES = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)
OWN_MODULES = "specdec"
STANDARD_ERROR = 2
WAITING_BYTES_MAX = 1 << 20  # some 4,000 lines: a reader that pauses for seconds loses none
PART_LENGTH_MAX = 1 << 14  # of a line that has no end yet
LAST_WORDS_S = 1.0  # at the end of the process, for a reader that is slow
WITHHELD_FIELDS = frozenset({"prompt", "text", "token_ids", "output_token_ids", "stop", "stop_string"})

get_logger = structlog.get_logger  # `get_logger().info("link up", peer=address)`, even before logs are configured
# Binds fields to every line logged by this task from here on, and by those it starts; it is one request's own.
bind = structlog.contextvars.bind_contextvars


def _withhold(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replaces the texts of users and answers; log lines are kept longer and read by more people than texts."""
    for name in WITHHELD_FIELDS & event.keys():
        event[name] = "(withheld)"
    return event


class _Lines:
    """The last stage of a line: it goes to the thread that writes."""

    def write(self, line: str) -> None:
        _writer().put(_encoded(line + "\n"))

    log = debug = info = warning = error = critical = write


class _StandardError(io.TextIOBase):
    """`sys.stderr` of a service. Writes whole lines, and on `flush` what there is of the last."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self) -> None:
        self._part = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            lines, end, self._part = (self._part + text).rpartition("\n")
            if lines or end:
                _writer().put(_encoded(lines + end))
            if len(self._part) > PART_LENGTH_MAX:
                self.flush()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            part, self._part = self._part, ""
            if part:
                _writer().put(_encoded(part))

    def fileno(self) -> int:
        return STANDARD_ERROR

    def isatty(self) -> bool:
        return os.isatty(STANDARD_ERROR)

    def writable(self) -> bool:
        return True


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
    """Formats the lines of modules that use the standard library's logging, such as the engine's and those of
    libraries, like all others."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:  # its arguments do not fit
            message = _text(record.msg)
        level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)  # libraries have further ones
        get_logger(component=record.name).log(level, message, exc_info=record.exc_info)

    def flush(self) -> None:
        """Waits for LAST_WORDS_S at most; `logging` calls it at the end of the process."""
        flush_logs()


_writers: list[BackgroundWriter] = []  # one, once a service has configured its logs


def _writer() -> BackgroundWriter:
    return _writers[0]


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _text(value: object) -> str:
    """Returns the text of a field's value, or which type has none."""
    try:
        return str(value)
    except Exception as error:
        return f"({type(value).__name__}: no text, {type(error).__name__})"


def _guarded(level: int) -> type[Any]:
    """Returns a bound logger for lines from `level` on whose methods do not raise."""

    class Guarded(structlog.make_filtering_bound_logger(level)):  # type: ignore[misc]  # a class made at run time
        def _proxy_to_logger(self, method_name: str, event: str | None = None, **fields: Any) -> None:
            try:
                super()._proxy_to_logger(method_name, event, **fields)
            except Exception as error:
                try:
                    line = {"event": str(event), "level": method_name, "unreadable": type(error).__name__}
                    _writer().put(_encoded(json.dumps(line) + "\n"))
                except Exception:
                    _writer().lose()

    return Guarded


def lost_line_count() -> int:
    """Returns the number of lines of this process that were lost."""
    return _writers[0].lost_count if _writers else 0


def flush_logs(timeout_s: float = LAST_WORDS_S) -> bool:
    """Waits until all lines are written or lost; False if that takes longer. For the end of the process."""
    return not _writers or _writers[0].flush(timeout_s)


def _divert_standard_error() -> None:
    """Gives standard error to the thread that writes. Libraries that took hold of it before hand their lines on."""
    if not _writers:
        writer = BackgroundWriter(STANDARD_ERROR, "log writer", WAITING_BYTES_MAX, recovered=_report_losses)
        _writers.append(writer)
    held = sys.stderr, sys.__stderr__
    for logger in logging.Logger.manager.loggerDict.values():
        for handler in list(getattr(logger, "handlers", ())):
            if isinstance(logger, logging.Logger) and getattr(handler, "stream", None) in held:
                logger.removeHandler(handler)
                logger.propagate = True
    sys.stderr = _StandardError()


def _report_losses(count: int) -> None:
    get_logger().warning("log lines were lost", lines=count, total=lost_line_count())


def configure_logs(level: str, service: str) -> None:
    """Sets up logging of this process, a service; the last call counts."""
    _divert_standard_error()
    renderers: list[Any] = [EXCEPTIONS_WITHOUT_VALUES, structlog.processors.JSONRenderer(default=_text), _escape_delete]
    if os.isatty(STANDARD_ERROR):
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
        wrapper_class=_guarded(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: _Lines(),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    root = logging.getLogger()
    root.handlers = [*(one for one in root.handlers if not isinstance(one, _Forwarding)), _Forwarding()]
    logging.getLogger(OWN_MODULES).setLevel(level.upper())
    logging.captureWarnings(True)
