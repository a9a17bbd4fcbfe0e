"""OTEL_* variables whose values the SDK would end a process for: a value that does not parse is as good as none.

The specification says so: warn, and ignore the setting. They are often set for all programs of a machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, MutableMapping

from specdec.telemetry.logs import get_logger

QUEUE_SPAN_COUNT_MAX = 1 << 20  # some 2 GB without a collector
SECONDS_MAX = 86_400
SHOWN_CHARACTERS_MAX = 80


def whole(least: int, largest: int) -> tuple[Callable[[str], bool], str]:
    """The test of a whole number, and its limits in words."""

    def is_valid(text: str) -> bool:
        try:
            return least <= int(text) <= largest
        except ValueError:
            return False

    return is_valid, f"a whole number from {least} to {largest}"


def real(largest: float) -> tuple[Callable[[str], bool], str]:
    """The test of a number from 0 to `largest`, and its limits in words."""

    def is_valid(text: str) -> bool:
        try:
            number = float(text)
        except ValueError:
            return False
        return math.isfinite(number) and 0 <= number <= largest

    return is_valid, f"a number from 0 to {largest:g}"


def named(names: Collection[str]) -> tuple[Callable[[str], bool], str]:
    """The test of a name, in any case, and the names in words."""
    return (lambda text: text.strip().lower() in names), " or ".join(names)


TIMEOUT, COUNT, COMPRESSION = real(SECONDS_MAX), whole(0, (1 << 31) - 1), named(("gzip", "none"))
MILLISECONDS = whole(1, 1000 * SECONDS_MAX)
SIZE = whole(1, QUEUE_SPAN_COUNT_MAX)
VARIABLES: dict[str, tuple[Callable[[str], bool], str]] = {
    "OTEL_EXPORTER_OTLP_TIMEOUT": TIMEOUT,
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": TIMEOUT,
    "OTEL_EXPORTER_OTLP_COMPRESSION": COMPRESSION,
    "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": COMPRESSION,
    "OTEL_BSP_SCHEDULE_DELAY": MILLISECONDS,
    "OTEL_BSP_EXPORT_TIMEOUT": MILLISECONDS,
    "OTEL_BSP_MAX_QUEUE_SIZE": SIZE,
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": SIZE,
    "OTEL_TRACES_SAMPLER_ARG": real(1.0),
    "OTEL_ATTRIBUTE_COUNT_LIMIT": COUNT,
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": COUNT,
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT": COUNT,
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT": COUNT,
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": COUNT,
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": COUNT,
    "OTEL_SPAN_EVENT_COUNT_LIMIT": COUNT,
    "OTEL_SPAN_LINK_COUNT_LIMIT": COUNT,
}
NO_COMPRESSION = "none"  # a name that the SDK does not have: it compresses nothing if none is set


def drop_unusable(environment: MutableMapping[str, str]) -> None:
    """Removes what does not parse, with a warning for each. Call it before the SDK is imported, which reads some."""
    for name, (is_valid, wanted) in VARIABLES.items():
        value = environment.get(name)
        if value is None or (is_valid(value) and value.strip().lower() != NO_COMPRESSION):
            continue
        del environment[name]
        if value.strip() and not is_valid(value):  # an empty value counts as none
            shown = value[:SHOWN_CHARACTERS_MAX]
            get_logger().warning("variable is ignored", variable=name, value=shown, must_be=wanted)
