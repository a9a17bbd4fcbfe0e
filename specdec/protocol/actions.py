"""What a session asks its owner to do. Carried out in order; none of them fails."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.protocol.items import DraftAsk, TargetAsk


@dataclass(frozen=True, slots=True)
class ToTarget:
    """Send this item to the target."""

    item: TargetAsk


@dataclass(frozen=True, slots=True)
class ToDraft:
    """Send this item to the draft."""

    item: DraftAsk


@dataclass(frozen=True, slots=True)
class AwaitDraft:
    """Start a timer; after `wait_s` seconds, call `on_wait_expired(wait_index)`. It need not be cancelled."""

    wait_index: int
    wait_s: float


Action = ToTarget | ToDraft | AwaitDraft
