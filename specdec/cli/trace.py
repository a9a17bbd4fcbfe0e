"""`specdec trace ID`: a generation's trace and its times on the terminal; two ids: side by side.

It reads Jaeger's API or a file, finds the newest, slowest and failed generations, and writes files for Jaeger's upload
page.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from specdec.cli.options import UsageError
from specdec.config import CONNECTION, OUTPUT
from specdec.errors import ConfigError, SessionUnknown
from specdec.settings import Settings, setting
from specdec.terminal import make_console, print_text
from specdec.traces.facts import Facts, facts_of
from specdec.traces.reader import (
    COORDINATOR,
    DRAFT,
    SEARCH_HOURS,
    TraceTree,
    fetch,
    find,
    resource_spans,
    search,
    spans_of,
)

TRACE_ID = re.compile(r"[0-9a-fA-F]{32}")
SEARCHED_COUNT = 200  # newest traces among which the slowest and failed ones are looked for


def check_trace_id(text: str) -> str:
    if not TRACE_ID.fullmatch(text):
        raise ValueError("it must be 32 hexadecimal digits, as `finished` prints them")
    return text.lower()


TraceId = Annotated[str, AfterValidator(check_trace_id)]


class TraceSettings(Settings):
    """The trace to show, and its output format."""

    request_or_trace_id: TraceId | None = setting(
        None, CONNECTION, "Request id (`started`) or trace id (`finished`) of a generation.", positional=True
    )
    other_id: TraceId | None = setting(
        None, CONNECTION, "Id of a second generation, shown beside the first.", positional=True
    )
    jaeger: str = setting("http://localhost:16686", CONNECTION, "URL of Jaeger's API.")
    file: Path | None = setting(None, CONNECTION, "Read the trace from this file instead of Jaeger.")
    last: bool = setting(False, CONNECTION, "Show the newest generation.")
    slowest: int | None = setting(None, CONNECTION, "List the N slowest generations.", ge=1, le=SEARCHED_COUNT)
    errors: bool = setting(False, CONNECTION, "List generations that failed or lost their draft.")
    hours: float = setting(24.0, CONNECTION, "Age of what --last, --slowest and --errors find.", gt=0, le=24 * 365)
    export: Path | None = setting(None, OUTPUT, "Write the trace to this file, for Jaeger's upload page.")
    all: bool = setting(False, OUTPUT, "Show every span; otherwise those of one name share a line.")
    as_json: bool = setting(False, OUTPUT, "Print the facts as JSON.")


def trace(settings: TraceSettings) -> int:
    """Runs the command. Raises SpecdecError without such a trace, or if Jaeger does not answer."""
    sources = (settings.request_or_trace_id, settings.file, settings.last, settings.slowest, settings.errors)
    if sum(source not in (None, False) for source in sources) != 1:
        raise UsageError(
            "give a trace id, --file, --last, --slowest or --errors, one of them; see specdec trace --help"
        )
    if settings.slowest is not None or settings.errors:
        _print([facts_of(tree) for tree in _listed(settings)], settings)
        return 0
    found = _read(settings, settings.request_or_trace_id)
    if settings.export is not None:
        settings.export.write_text(json.dumps({"resourceSpans": found}, indent=1), encoding="utf-8")
    trees = [TraceTree(spans_of(found))]
    if settings.other_id is not None:
        trees.append(TraceTree(spans_of(_read(settings, settings.other_id))))
    if settings.as_json or len(trees) > 1:
        _print([facts_of(tree) for tree in trees], settings)
        return 0
    from specdec.cli.trace_view import show

    show(trees[0], make_console(), settings.all)
    return 0


def _print(found: list[Facts], settings: TraceSettings) -> None:
    """Prints facts as JSON, side by side, or as a list."""
    if settings.as_json:
        values = [facts.as_json() for facts in found]
        is_one = settings.slowest is None and not settings.errors and settings.other_id is None
        print_text(json.dumps(values[0] if is_one else values, indent=1))
        return
    from specdec.cli.trace_view import listing, side_by_side

    make_console().print(side_by_side(*found) if settings.other_id is not None else listing(found))


def _read(settings: TraceSettings, trace_id: str | None) -> list[dict[str, Any]]:
    """Returns the resource spans of the trace. Raises SpecdecError."""
    if settings.file is not None:
        try:
            return resource_spans(settings.file.read_bytes())
        except OSError as error:
            raise ConfigError(f"--file {settings.file} cannot be read: {error.strerror}") from None
    if trace_id is None:
        (newest,) = _trees(settings, {}, 1)
        trace_id = newest.root.trace_id
    try:
        return fetch(settings.jaeger, trace_id)
    except SessionUnknown as unknown:
        now = datetime.now(UTC)
        try:
            return find(settings.jaeger, trace_id, now - timedelta(hours=SEARCH_HOURS), now)
        except (SessionUnknown, ConfigError):
            raise unknown from None


def _trees(
    settings: TraceSettings, attributes: dict[str, str], count: int, services: Sequence[str] = (COORDINATOR,)
) -> list[TraceTree]:
    """Returns the newest generations within --hours that have a span of one of the services with these attributes,
    newest first. Raises SessionUnknown without any."""
    now = datetime.now(UTC)
    since, found = now - timedelta(hours=settings.hours), []
    for service in services:
        with contextlib.suppress(SessionUnknown):
            found += search(settings.jaeger, attributes, since, now, count, service)
    by_trace = defaultdict(list)
    for span in spans_of(found):
        by_trace[span.trace_id].append(span)
    trees = []
    for spans in by_trace.values():
        try:
            trees.append(TraceTree(spans))
        except SessionUnknown:  # not finished, or another call
            continue
    if not trees:
        raise SessionUnknown(f"no generation of the last {settings.hours:g} hours is among these traces")
    return sorted(trees, key=lambda tree: tree.root.start_ns, reverse=True)[:count]


def _listed(settings: TraceSettings) -> list[TraceTree]:
    """Returns the generations that --slowest or --errors lists."""
    if settings.slowest is not None:
        found = _trees(settings, {}, SEARCHED_COUNT)
        return sorted(found, key=lambda tree: tree.root.duration_ms, reverse=True)[: settings.slowest]
    try:
        found = _trees(settings, {"error": "true"}, SEARCHED_COUNT, (COORDINATOR, DRAFT))
    except SessionUnknown as error:
        raise SessionUnknown(f"no failure was found: {error}") from None
    return [tree for tree in found if any(span.is_failed for span in tree.spans)]
