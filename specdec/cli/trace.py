"""`specdec trace ID`: a generation's trace and its times on the terminal.

It reads Jaeger's API or a file, and writes files for Jaeger's upload page.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from specdec.cli.options import UsageError
from specdec.config import CONNECTION, OUTPUT
from specdec.errors import ConfigError, SessionUnknown
from specdec.settings import Settings, setting
from specdec.telemetry.trace_reader import SEARCH_HOURS, TraceTree, fetch, find, resource_spans, spans_of

TRACE_ID = re.compile(r"[0-9a-fA-F]{32}")


def check_trace_id(text: str) -> str:
    if not TRACE_ID.fullmatch(text):
        raise ValueError("it must be 32 hexadecimal digits, as `finished` prints them")
    return text.lower()


class TraceSettings(Settings):
    """The trace to show, and its output format."""

    request_or_trace_id: Annotated[str, AfterValidator(check_trace_id)] | None = setting(
        None, CONNECTION, "Request id (`started`) or trace id (`finished`) of a generation.", positional=True
    )
    jaeger: str = setting("http://localhost:16686", CONNECTION, "URL of Jaeger's API.")
    file: Path | None = setting(None, CONNECTION, "Read the trace from this file instead of Jaeger.")
    export: Path | None = setting(None, OUTPUT, "Write the trace to this file, for Jaeger's upload page.")
    all: bool = setting(False, OUTPUT, "Show every span; otherwise 12 of each kind.")


def trace(settings: TraceSettings) -> int:
    """Runs the command. Raises SpecdecError without such a trace, or if Jaeger does not answer."""
    if (settings.request_or_trace_id is None) == (settings.file is None):
        raise UsageError("give a trace id or --file, one of the two; see specdec trace --help")
    found = read(settings)
    if settings.export is not None:
        settings.export.write_text(json.dumps({"resourceSpans": found}, indent=1), encoding="utf-8")
    from rich.console import Console

    from specdec.cli.trace_view import show

    show(TraceTree(spans_of(found)), Console(), settings.all)
    return 0


def read(settings: TraceSettings) -> list[dict[str, Any]]:
    """Returns the resource spans of the trace. Raises SpecdecError."""
    if settings.file is not None:
        try:
            return resource_spans(settings.file.read_bytes())
        except OSError as error:
            raise ConfigError(f"--file {settings.file} cannot be read: {error.strerror}") from None
    assert settings.request_or_trace_id is not None
    try:
        return fetch(settings.jaeger, settings.request_or_trace_id)
    except SessionUnknown as unknown:
        now = datetime.now(UTC)
        since = now - timedelta(hours=SEARCH_HOURS)
        try:
            return find(settings.jaeger, settings.request_or_trace_id, since.isoformat(), now.isoformat())
        except (SessionUnknown, ConfigError):
            raise unknown from None
