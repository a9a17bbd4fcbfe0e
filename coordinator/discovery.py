"""Stub until the real one is merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Member(NamedTuple):
    """An address of a pool; `tls_name`: the name that its certificate must have, "" for that of the address."""

    address: str
    tls_name: str = ""


class Discovery:
    """Finds."""

    def __init__(self, values: Sequence[str], changed: Callable[[tuple[Member, ...]], None]) -> None:
        self._values, self._changed = values, changed

    async def run(self) -> None:
        self._changed(tuple(Member(value) for value in self._values))
