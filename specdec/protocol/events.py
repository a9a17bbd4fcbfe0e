"""What happens to a session, and what it wants done: the events of `Session.step` and its answer, `Ready`. Values."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from specdec.protocol.items import DraftAnswer, DraftItem, TargetAnswer, TargetItem, VerificationResult
from specdec.protocol.records import NO_TIMES, RoundRecord, RoundTimes
from specdec.protocol.types import Verdict


class TargetFound(NamedTuple):
    """A target is there for the session: at its start, or in place of one that was lost."""


class TargetLost(NamedTuple):
    """The target is lost, for the reason given, in a sentence and in a word; the round in flight stays, for the next
    target."""

    reason: str = "the target was lost"
    cause: str = "lost"


class FromTarget(NamedTuple):
    """An answer of the target came. The session takes what it says of missing tokens; a result only concluded."""

    item: TargetAnswer


class Concluded(NamedTuple):
    """The result that the session expects came, and the rule's verdict on it. `token_ids`: those of the round that are
    committed, all of them unless the text `ends` there. `times`: by the owner's clock."""

    verdict: Verdict
    answer: VerificationResult
    token_ids: tuple[int, ...]
    ends: bool = False
    times: RoundTimes = NO_TIMES


class DraftFound(NamedTuple):
    """A draft is there for the session, for the first time or again. `is_late`: not from its start on."""

    is_late: bool = True


class DraftLost(NamedTuple):
    """The draft is lost; its nodes stay usable."""


class DraftStops(NamedTuple):
    """The draft stops soon; its owner changes drafts if another is there. The session takes no notice."""


class FromDraft(NamedTuple):
    """An answer of the draft came."""

    item: DraftAnswer


class WaitExpired(NamedTuple):
    """The time of a wait for draft tokens is over."""

    wait_index: int


class End(NamedTuple):
    """The session is not wanted any longer."""


Event = (
    TargetFound
    | TargetLost
    | FromTarget
    | Concluded
    | DraftFound
    | DraftLost
    | DraftStops
    | FromDraft
    | WaitExpired
    | End
)


class Wait(NamedTuple):
    """A wait for draft tokens: `WaitExpired(wait_index)` is due after `wait_s` seconds, unless a verification is sent
    before."""

    wait_index: int
    wait_s: float


class Note(NamedTuple):
    """Something of a session that no record says, by name, for people who look at it."""

    name: str
    attributes: dict[str, str | int] = {}


class Ready(NamedTuple):
    """What a session wants done after an event: items sent in this order, first those to the draft, and a wait begun.
    `record`: of the round that ended by it; `note`: what to tell observers."""

    to_draft: tuple[DraftItem, ...] = ()
    to_target: tuple[TargetItem, ...] = ()
    wait: Wait | None = None
    record: RoundRecord | None = None
    note: Note | None = None


NOTHING_READY = Ready()


@lru_cache(64)  # after every miss some are late
def noting_late(count: int) -> Ready:
    """Returns a note of draft tokens that came too late; nothing for none."""
    return Ready(note=Note("draft tokens late", {"count": count})) if count else NOTHING_READY
