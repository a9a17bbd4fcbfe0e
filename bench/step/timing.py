"""One timed generation, of ours or of another server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timed:
    """The seconds of a whole request, by the client's clock, and its tokens."""

    seconds: float
    token_ids: tuple[int, ...]

    @property
    def tokens_per_s(self) -> float:
        return len(self.token_ids) / self.seconds
