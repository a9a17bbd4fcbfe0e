"""Which replica a text goes to, decided by each coordinator alone: pure, the caller draws and reports.

Texts of one conversation should reach one target, which has its beginning in its cache, whichever coordinator they
pass; common beginnings should spread over all targets. So a prompt has a key: the digest of its first block after the
last place where prompts are known to differ (`Keys`). A shared system prompt is such a place; below it a conversation
keeps its key from turn to turn. Key and address are hashed together for each target (rendezvous hashing, Thaler and
Ravishankar 1998): all coordinators get the same order, and a target that comes or goes changes the first place of its
own keys only. A text goes to the first target in this order whose load is within a bound of the mean (consistent
hashing with bounded loads, Mirrokni, Thorup, Zadimoghaddam 2018). Without a key it goes to the less loaded of two
random ones (Mitzenmacher 2001), as a text does among drafts, which may be far.

A load is a share of a replica's capacity, `FULL` and more: no further session fits. It is the replica's last report
and the caller's own openings since, each at `session_load`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from specdec.protocol.prefix_digests import chain_digests, root_digest

BLOCK_SIZE = 64  # tokens: shorter beginnings are cheaper computed again than queued for
DIGESTED_BLOCKS_MAX = 256  # of a prompt: beginnings that differ later only are one
NEW_BLOCKS_MAX = 64  # that one prompt adds to what is remembered
REMEMBERED_MAX = 4096  # digests, of either table: some 2 MB
FULL = 1.0
BOUND = 1.15  # load of the target that a text goes to, over the mean
SESSION_LOAD_GUESS = 1 / 64  # of a session, while no replica reports one

Draw = Callable[[int], int]  # a random integer from 0 to below the argument


class Candidate(Protocol):
    """A replica that may take a text. `load`: 0 if idle, FULL and more if no further session fits."""

    @property
    def address(self) -> str: ...

    @property
    def load(self) -> float: ...


C = TypeVar("C", bound=Candidate)
T = TypeVar("T")


class Keys:
    """The keys of prompts, and where prompts were seen to differ: bounded, whatever is sent."""

    def __init__(self) -> None:
        self._seen: dict[bytes, bytes] = {}  # a digest and the first that followed it, the least lately used first
        self._branches: dict[bytes, bytes] = {}  # those that two followed; the value is of no use

    def key(self, token_ids: Sequence[int], salt: str, name: str = "", encoder_length: int = 0) -> bytes:
        """Returns the key of a prompt, and remembers its first blocks. `name`, if not empty, takes their place: equal
        names, with equal salts, have equal keys. An encoder's input, the first `encoder_length` tokens, is the key as
        a whole: a cache has all of it or none. b"": less than one block, no key."""
        root = root_digest(salt)
        if name:
            return hashlib.sha256(root + name.encode("utf-8")).digest()
        if encoder_length:
            return root_digest(salt, token_ids[:encoder_length]) if encoder_length >= BLOCK_SIZE else b""
        key, parent, new_count = b"", root, 0
        for digest in islice(chain_digests(root, token_ids, BLOCK_SIZE), DIGESTED_BLOCKS_MAX):
            if parent is root or _use(self._branches, parent):
                key = digest
            elif first := _use(self._seen, parent):
                if first != digest:
                    del self._seen[parent]
                    _add(self._branches, parent, digest)
                    key = digest
            elif new_count < NEW_BLOCKS_MAX:
                new_count += 1
                _add(self._seen, parent, digest)
            parent = digest
        return key


def _use(table: dict[bytes, bytes], digest: bytes) -> bytes | None:
    """Returns the value of a digest, which becomes the last used, or None."""
    if (value := table.pop(digest, None)) is not None:
        table[digest] = value
    return value


def _add(table: dict[bytes, bytes], digest: bytes, value: bytes) -> None:
    """Adds an entry in place of the least lately used one."""
    if len(table) >= REMEMBERED_MAX:
        del table[next(iter(table))]
    table[digest] = value


def order(key: bytes, addresses: Iterable[str]) -> list[str]:
    """Returns the addresses in the order of a key, the same at every coordinator."""
    return sorted(addresses, key=lambda address: _rank(key, address), reverse=True)


def _rank(key: bytes, address: str) -> bytes:
    return hashlib.sha256(key + address.encode("utf-8")).digest()


def choose(key: bytes, candidates: Sequence[C], draw: Draw, session_load: float = SESSION_LOAD_GUESS) -> C:
    """Returns the target for a text with this key; `candidates` are one at least. The bound leaves free at least half
    of what the mean does: other coordinators open sessions too. Full ones are chosen only if all are. A text that the
    chosen one refuses goes to the next by another call without it."""
    if not key:
        return of_two(_not_full(candidates), lambda candidate: candidate.load, draw)
    loads = [candidate.load for candidate in candidates]
    mean = sum(loads) / len(loads)
    bound = min(BOUND * mean + session_load, (mean + FULL) / 2)
    within = [candidate for candidate, load in zip(candidates, loads) if load <= bound and load < FULL]
    return max(within or candidates, key=lambda candidate: _rank(key, candidate.address))


def choose_draft(candidates: Sequence[C], wait_s: Callable[[C], float], draw: Draw) -> C:
    """Returns the draft for a text, near and idle: of two random ones that are not full the one with the smaller
    `wait_s`, its network round trip and a step with one session more, in seconds."""
    return of_two(_not_full(candidates), wait_s, draw)


def of_two(candidates: Sequence[T], cost: Callable[[T], float], draw: Draw) -> T:
    """Returns the cheaper of two different random candidates, or the only one."""
    first = draw(len(candidates))
    if len(candidates) == 1:
        return candidates[first]
    second = draw(len(candidates) - 1)
    return min(candidates[first], candidates[second + (second >= first)], key=cost)


def _not_full(candidates: Sequence[C]) -> Sequence[C]:
    return [candidate for candidate in candidates if candidate.load < FULL] or candidates


def session_load(reports: Iterable[tuple[int, float]]) -> float:
    """Returns what one session adds to a load: the mean over reports (sessions, load) of a pool's replicas."""
    known = [(sessions, load) for sessions, load in reports if sessions > 0]
    if not known:
        return SESSION_LOAD_GUESS
    return sum(load for _, load in known) / sum(sessions for sessions, _ in known)
