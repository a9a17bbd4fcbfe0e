"""Text generated before, and the proposer that continues a match in it.

The store knows texts by cache salt, and divides its bytes among the salts; it does not know who generates or why. It
works in pieces, so that an event loop which owns it is never held up. Pure: no clock, no I/O, no model.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.protocol.proposers import MATCH_LENGTH_MAX, PLACES_MAX, RUN_LENGTH_MAX, Run, match_length, runs_of
from specdec.protocol.types import Proposer

SUFFIX_LENGTH_MIN = 4  # of a match in earlier text, which is more than one's own
SUFFIX_TEXT_LENGTH_MAX = 4096  # tokens of one text that are stored, its last ones
STORED_TOKEN_BYTES = 190  # of one token in the store, its place included, measured on text that never repeats
PIECE_LENGTH = 64  # places that are added or forgotten at a time: a tenth of a millisecond
WAITING_TOKENS_MAX = 1 << 16  # of texts that wait to be added; a coordinator's generations end more slowly
SHARE_COUNT_MAX = 256  # salts with a share of their own; a victim is sought among them for each forgotten text


@dataclass(slots=True, eq=False)
class Share:
    """The texts that compete for one part of the store, the least recently used first."""

    texts: OrderedDict[int, StoredText] = field(default_factory=OrderedDict)
    token_count: int = 0

    def take(self, text: StoredText) -> None:
        """Adds a text, which is in use now."""
        self.texts[text.number] = text
        self.token_count += len(text.token_ids)
        text.share = self

    def give(self, text: StoredText) -> None:
        """Removes a text."""
        del self.texts[text.number]
        self.token_count -= len(text.token_ids)


@dataclass(slots=True, eq=False)
class StoredText:
    """A text; the places from `start` to before `end` can be found, all of them but while it is added or forgotten."""

    number: int
    salt: str
    token_ids: array[int]
    share: Share
    start: int = SUFFIX_LENGTH_MIN
    end: int = SUFFIX_LENGTH_MIN

    @property
    def is_whole(self) -> bool:
        """Whether all its places can be found."""
        return self.start == SUFFIX_LENGTH_MIN and self.end == len(self.token_ids)

    def key(self, end: int) -> bytes:
        """Returns what the place `end` is found by: the tokens before it."""
        return self.token_ids[end - SUFFIX_LENGTH_MIN : end].tobytes()


class SuffixStore:
    """Text generated before, by cache salt, bounded in bytes. A salt's texts are found by that salt only.

    A salt has a share of its own once a text of it was found or generated again, all other salts have one in common.
    Space is made in the largest share, where the least recently used text goes first. So while n shares hold texts, one
    of less than 1/n of the store, less the new text, loses nothing, whatever the others generate. Salts with shares are
    at most SHARE_COUNT_MAX: beyond, the one that was least recently used returns to the common share.
    """

    def __init__(self, bytes_max: int) -> None:
        self._tokens_max = bytes_max // STORED_TOKEN_BYTES
        self._places: dict[str, dict[bytes, tuple[int, ...]]] = {}  # by salt and key, the latest last: see `_place`
        self._texts: dict[int, StoredText] = {}
        self._common = Share()
        self._shares: OrderedDict[str, Share] = OrderedDict()  # the least recently used first
        self._waiting: deque[tuple[str, array[int]]] = deque()
        self._growing: StoredText | None = None
        self._waiting_count = self._token_count = self._count = 0

    @property
    def byte_count(self) -> int:
        """Bytes in use, estimated, without the texts that wait."""
        return self._token_count * STORED_TOKEN_BYTES

    def add(self, salt: str, token_ids: Sequence[int]) -> bool:
        """Takes a text, its last SUFFIX_TEXT_LENGTH_MAX tokens, for `work` to store; drops it while too many wait.
        Returns whether `work` has to be called, as it had nothing left to do."""
        text = array("I", token_ids[-min(SUFFIX_TEXT_LENGTH_MAX, max(1, self._tokens_max)) :])
        if len(text) <= SUFFIX_LENGTH_MIN or self._waiting_count + len(text) > WAITING_TOKENS_MAX:
            return False
        was_idle = not self._waiting and self._growing is None
        self._waiting.append((salt, text))
        self._waiting_count += len(text)
        return was_idle

    def work(self) -> bool:
        """Adds or forgets PIECE_LENGTH places at most. Returns whether more is left to do."""
        if self._growing is not None:
            self._grow(self._growing)
        elif self._waiting:
            salt, token_ids = self._waiting[0]
            if self._is_stored(salt, token_ids):
                self._next_waiting()
            elif self._token_count + len(token_ids) > self._tokens_max:
                self._forget()
            else:
                self._next_waiting()
                self._count += 1
                share = self._shares.get(salt, self._common)
                self._growing = self._texts[self._count] = StoredText(self._count, salt, token_ids, share)
                share.take(self._growing)
                self._token_count += len(token_ids)
                self._grow(self._growing)
        return self._growing is not None or bool(self._waiting)

    def runs(self, salt: str, committed: Sequence[int]) -> list[Run]:
        """Returns the continuations of the longest matches in the texts of a salt, which are in use now."""
        recent = committed[-MATCH_LENGTH_MAX:]
        if len(recent) < SUFFIX_LENGTH_MIN:
            return []
        key = array("I", recent[-SUFFIX_LENGTH_MIN:]).tobytes()
        found = [self._found(place) for place in self._places.get(salt, {}).get(key, ())]
        matches = []
        for index, (text, end) in enumerate(found):
            self._use(text)
            matches.append((match_length(text.token_ids, end, recent, len(recent)), index))

        def tokens_at(index: int) -> tuple[int, ...]:
            text, end = found[index]
            return tuple(text.token_ids[end : end + RUN_LENGTH_MAX])

        return runs_of(Proposer.SUFFIX, matches, tokens_at)

    def _found(self, place: int) -> tuple[StoredText, int]:
        """Returns the text of a place, and the number of its tokens before it."""
        number, end = divmod(place, SUFFIX_TEXT_LENGTH_MAX)
        return self._texts[number], end

    def _next_waiting(self) -> None:
        self._waiting_count -= len(self._waiting.popleft()[1])

    def _is_stored(self, salt: str, token_ids: array[int]) -> bool:
        """Whether a text is stored already: then it is in use now."""
        key = token_ids[-1 - SUFFIX_LENGTH_MIN : -1].tobytes()
        for place in self._places.get(salt, {}).get(key, ()):
            text = self._found(place)[0]
            if text.is_whole and text.token_ids == token_ids:
                self._use(text)
                return True
        return False

    def _use(self, text: StoredText) -> None:
        """A text was found, or generated again: it is the last of its salt to go, and its salt has a share."""
        share = self._shares.setdefault(text.salt, Share())
        self._shares.move_to_end(text.salt)
        text.share.give(text)
        share.take(text)
        if len(self._shares) > SHARE_COUNT_MAX:
            for other in list(self._shares.popitem(last=False)[1].texts.values()):
                self._common.take(other)

    def _grow(self, text: StoredText) -> None:
        """Files the next places of a text."""
        places = self._places.setdefault(text.salt, {})
        first, text.end = text.end, min(text.end + PIECE_LENGTH, len(text.token_ids))
        for end in range(first, text.end):
            key, place = text.key(end), text.number * SUFFIX_TEXT_LENGTH_MAX + end
            places[key] = (*places.get(key, ())[1 - PLACES_MAX :], place)
        if text.end == len(text.token_ids):
            self._growing = None

    def _forget(self) -> None:
        """Removes places of the least recently used text in the largest share; with the last of them the text."""
        share = max((self._common, *self._shares.values()), key=lambda share: share.token_count)
        text = next(iter(share.texts.values()))
        places = self._places[text.salt]
        first, text.start = text.start, min(text.start + PIECE_LENGTH, text.end)
        for end in range(first, text.start):
            key, place = text.key(end), text.number * SUFFIX_TEXT_LENGTH_MAX + end
            left = tuple(other for other in places.get(key, ()) if other != place)
            if left:
                places[key] = left
            else:
                places.pop(key, None)
        if text.start == text.end:
            share.give(text)
            del self._texts[text.number]
            self._token_count -= len(text.token_ids)
            if not places:
                del self._places[text.salt]
            if not share.texts and share is not self._common:
                del self._shares[text.salt]


class SuffixProposer:
    """The continuation of a match in text that the store has for a salt (suffix decoding, Oliaro et al. 2024)."""

    def __init__(self, store: SuffixStore, salt: str) -> None:
        self._store, self._salt = store, salt

    def propose(self, committed: Sequence[int]) -> list[Run]:
        return self._store.runs(self._salt, committed)
