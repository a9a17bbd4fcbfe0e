"""A pool: the replicas of one kind, members that come and go while the coordinator runs.

Discovery says who its members are; each has its own link. One that is no longer a member gets no new texts and is
removed when it serves none, or its link is lost. A process with two addresses counts once. Replicas of one model share
what is measured: a new one is known from its first text on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from specdec.coordinator.discovery import Member
from specdec.coordinator.ejection import Health, PoolHealth
from specdec.coordinator.peers import Peer
from specdec.errors import ReplicaUnavailable
from specdec.protocol.types import Description

P = TypeVar("P", bound=Peer)


class Pool(Generic[P]):
    """`make` makes a replica of a member, which calls `on_changed`. `name`: of its kind. Belongs to the event loop; its
    links run from `start` to `stop`."""

    def __init__(self, name: str, make: Callable[[Member, Health], P]) -> None:
        self._name = name
        self._health = PoolHealth()
        self._make = make
        self._members: dict[str, P] = {}  # by address, in the order of discovery
        self._links: dict[P, asyncio.Task[None]] | None = None  # None: they do not run

    @property
    def peers(self) -> tuple[P, ...]:
        """All replicas, also those that are no longer members and still serve."""
        return tuple(self._members.values())

    def update(self, members: Iterable[Member]) -> None:
        """These are its members from now on."""
        listed = {member.address: member for member in members}
        for address, peer in list(self._members.items()):
            if address not in listed:
                peer.set_listed(False)
        for address, member in listed.items():
            known = self._members.get(address)
            if known is not None:
                known.set_listed(True)
                continue
            peer = self._members[address] = self._make(member, self._health.add())
            if self._links is not None:
                self._links[peer] = asyncio.create_task(peer.link.run())

    def start(self) -> None:
        """Connects its members, and those that join."""
        self._links = {peer: asyncio.create_task(peer.link.run()) for peer in self.peers}

    async def stop(self) -> None:
        """Closes all links."""
        links, self._links = self._links or {}, None
        for link in links.values():
            link.cancel()
        await asyncio.gather(*links.values(), return_exceptions=True)

    def up(self) -> list[P]:
        """Returns the replicas that take new texts, each process once."""
        usable: dict[str, P] = {}
        for peer in self._members.values():
            if peer.is_up and peer.description is not None:
                usable.setdefault(peer.description.instance or peer.address, peer)
        return list(usable.values())

    def some(self) -> P:
        """Returns one of the replicas that take new texts. Raises ReplicaUnavailable with the reason if there is
        none."""
        for peer in self.up():
            return peer
        raise ReplicaUnavailable(f"no {self._name}: {self.absent_reason}")

    def fit(self, peers: list[P]) -> list[P]:
        """Returns those of `peers` that are not ejected; all if every one is."""
        now_s = time.monotonic()
        return [peer for peer in peers if not peer.health.is_ejected(now_s)] or peers

    def groups(self) -> list[tuple[Description, int]]:
        """Returns the models and numerics of the replicas that take new texts, and the number of each."""
        counts: dict[tuple[object, ...], tuple[Description, int]] = {}
        for peer in self.up():
            own = peer.usable()
            key = own.model_digest, own.numerics
            counts[key] = own, 1 + (counts[key][1] if key in counts else 0)
        return list(counts.values())

    @property
    def absent_reason(self) -> str:
        """The reason why none is usable, in words; empty while one is."""
        if self.up():
            return ""
        reasons = [peer.absent_reason for peer in self._members.values()]
        return reasons[0] if reasons else f"no {self._name} is listed"

    def on_changed(self, peer: P) -> bool:
        """A replica became usable, or no longer is; returns whether it is now. It measures together with the others of
        its model, or is the first."""
        self._retire(peer)
        if peer.description is None or peer.is_primed:
            return peer.is_up
        others = (other for other in self._members.values() if other is not peer and other.description is not None)
        peer.measure_with(next((other for other in others if other.model_key == peer.model_key), None))
        peer.is_primed = True
        return peer.is_up

    def _retire(self, peer: P) -> None:
        """Removes a replica that is no longer listed, once it serves nothing or is lost."""
        if peer.is_listed or self._members.get(peer.address) is not peer:
            return
        if peer.is_idle or not peer.link.is_up:
            del self._members[peer.address]
            self._health.remove(peer.health)
            if self._links is not None:
                self._links.pop(peer).cancel()
