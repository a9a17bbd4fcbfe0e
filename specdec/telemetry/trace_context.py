"""W3C trace context of incoming calls: the caller's, where it gives one."""

from __future__ import annotations

import re
from collections.abc import Iterable

from specdec.protocol.items import Trace

TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def caller_trace(metadata: Iterable[tuple[str, str | bytes]] | None) -> Trace | None:
    """The trace context of a call's metadata; a malformed `traceparent` counts as none, as the standard says."""
    for key, value in metadata or ():
        match = TRACEPARENT.fullmatch(value) if key == "traceparent" and isinstance(value, str) else None
        if match and int(match[1], 16) and int(match[2], 16):
            return Trace(bytes.fromhex(match[1]), bytes.fromhex(match[2]), bool(int(match[3], 16) & 1))
    return None
