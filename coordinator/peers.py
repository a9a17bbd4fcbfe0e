"""The peers of a coordinator: targets and drafts, each with its link, its description and what was measured of it.

A peer is used once its description is compatible (protocol version, tokenizer); until then, and while the link is down,
`description` is None and `absent_reason` holds the cause for users; addresses and other details are in the log. A peer
that announces its stop, is no longer a member of its pool, or is a draft of another kind than the targets, gets no new
generations; those it serves continue.
Generations attach by session number and are told the events of their session. One whose verification stays unanswered
for too long is told that its target is lost (`Deadlines`).
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Protocol, Self, TypeAlias

from specdec.config import TlsSettings
from specdec.coordinator.discovery import Member
from specdec.coordinator.ejection import Health
from specdec.errors import InvalidRequest, Mismatch, ReplicaUnavailable, SpecdecError
from specdec.policy.goodput import Goodput
from specdec.protocol.events import Event
from specdec.protocol.items import NO_TRACE, is_farewell
from specdec.protocol.routing import FULL, SESSION_LOAD_GUESS
from specdec.protocol.types import PROTOCOL_VERSION, Description, Proposer, Rule
from specdec.rpc.client import open_channel
from specdec.rpc.convert import description_from_message
from specdec.rpc.convert_items import item_from_message, item_to_bytes
from specdec.rpc.limits import STREAM_RESPONSE_BYTES_MAX
from specdec.rpc.link import CLOSED, HEALTHY_S, Link
from specdec.telemetry.logs import get_logger
from specdec.v1 import types_pb2 as types_pb

DESCRIBE_TIMEOUT_S = 5.0
DESCRIBE_RETRY_S = 0.5
NODES_PER_MESSAGE_MAX = 1 << 12  # twice what fits a message of several items, MESSAGE_BYTES_SOFT
STATES = ("up", "ejected", "stopping", "unlisted", "down")  # only those that are up get new texts
ModelKey: TypeAlias = tuple[Hashable, ...]  # of a target: weights and numerics; of a draft: weights
GoodputKey: TypeAlias = tuple[ModelKey, Rule, int, Proposer, bool]


class Listener(Protocol):
    """Who is told the events of one session: a generation. Called on the event loop; an exception ends that
    generation, not the link and the others."""

    names: dict[str, object]

    def take(self, event: Event, byte_count: int = 0) -> None:
        """Takes an event of the session; an answer with its share of the message's bytes."""

    def on_defect(self) -> None:
        """The other call failed."""


def check_node_count(count: int) -> None:
    """Raises InvalidRequest for a message with too many nodes, before any is read."""
    if count > NODES_PER_MESSAGE_MAX:
        raise InvalidRequest("nodes", count, f"at most {NODES_PER_MESSAGE_MAX} in one message")


class Peer(ABC):
    """One replica and its link, which connects by itself. `fingerprint`: of the tokenizer that it must have; `changed`
    is called when it becomes usable, or no longer is. `goodputs`: of plans with its model, by target, rule, cap and
    kinds of proposers."""

    name: ClassVar[str]
    service: ClassVar[str]
    stream_method: ClassVar[str]
    request: ClassVar[type]
    response: ClassVar[type]

    def __init__(
        self, member: Member, tls: TlsSettings, fingerprint: str, changed: Callable[[Peer], None], health: Health
    ) -> None:
        self.address = address = member.address
        self.health = health
        self.description: Description | None = None
        self.absent_reason = f"the {self.name} was not reached yet"
        self.is_stopping = False
        self.is_listed = True  # a member of its pool
        self.misfit = ""  # why it cannot work with those of the other pool
        self.is_primed = False  # its measurements are those of its model
        self._up_s = 0.0
        self.loss_count = 0  # connections that were lost
        self.model_name = ""  # of the last description
        self.model_key: ModelKey = ()
        self.goodputs: dict[GoodputKey, Goodput]
        self._measure_anew()
        self._fingerprint = fingerprint
        self._changed = changed
        self._listeners: dict[int, Listener] = {}
        self._refused_at = -1  # number of the load's report
        self._opened = (0, 0)  # number of the load's report, and of the sessions opened since
        self._tasks: tuple[asyncio.Task[None], ...] = ()  # of this connection
        self.link = Link(
            f"the {self.name} at {address}",
            lambda: open_channel(address, tls, STREAM_RESPONSE_BYTES_MAX, is_patient=True, tls_name=member.tls_name),
            f"/{self.service}/{self.stream_method}",
            self.request,
            self.response,
            self._on_up,
            self._on_items,
            self._on_down,
        )

    @property
    def is_up(self) -> bool:
        """Whether the peer is usable for new generations."""
        return self.description is not None and not (self.misfit or self.is_stopping) and self.is_listed

    @property
    def state(self) -> str:
        """One of STATES, for people."""
        if self.description is None or self.misfit:
            return "down"
        if not self.is_up:
            return "stopping" if self.is_stopping else "unlisted"
        return "ejected" if self.health.is_ejected(time.monotonic()) else "up"

    @property
    def is_idle(self) -> bool:
        """Whether it serves no generation of this coordinator."""
        return not self._listeners

    @property
    def load(self) -> float:
        """The share of it that is taken, 1 if no further session fits: by its last report, with the sessions that this
        coordinator opened since."""
        if self._refused_at == self.link.load_count:
            return FULL
        report_count, opened_count = self._opened
        since_count = opened_count if report_count == self.link.load_count else 0
        return self.reported_load + since_count * self.session_load

    def refused_one(self) -> None:
        """It refused a session: it counts as full until its next report."""
        self._refused_at = self.link.load_count

    @property
    def reported_load(self) -> float:
        """The share that is taken by its last report; 0 before the first."""
        return 0.0 if self.link.load is None else self.link.load[1]

    @property
    def session_load(self) -> float:
        """What a session adds to the load."""
        session_count, load = self.link.load or (0, 0.0)
        return load / session_count if session_count and load else SESSION_LOAD_GUESS

    @property
    def network_s(self) -> float | None:
        """The network round trip of the last exchange; None before the first."""
        return self.link.stamps.network_s

    def usable(self) -> Description:
        """Returns the description. Raises ReplicaUnavailable with the reason if the peer is not usable."""
        if self.description is None or not self.is_up:
            raise ReplicaUnavailable(f"no {self.name}: {self.absent_reason}")
        return self.description

    def attach(self, session: int, listener: Listener) -> None:
        """Tells the events of `session` to `listener` from now on."""
        self._listeners[session] = listener
        report_count, opened_count = self._opened
        now_count = self.link.load_count
        self._opened = now_count, 1 + (opened_count if report_count == now_count else 0)

    def detach(self, session: int) -> None:
        """Drops the events of `session` from now on; idempotent."""
        if self._listeners.pop(session, None) is not None and not self._listeners and not self.is_listed:
            self._changed(self)

    def set_listed(self, is_listed: bool) -> None:
        """It is a member of its pool from now on, or no longer, and gets no new generations then."""
        if is_listed != self.is_listed:
            self.is_listed = is_listed
            get_logger().info(f"{self.name} {'listed' if is_listed else 'no longer listed'}", peer=self.address)
            self._changed(self)

    def set_misfit(self, reason: str) -> None:
        """It cannot work with those of the other pool for this reason, and gets no new generations; empty: it can."""
        if reason != self.misfit:
            self.misfit = self.absent_reason = reason
            if reason:
                get_logger().error(f"{self.name} not used", peer=self.address, why=reason)
            self._changed(self)

    def send(self, item: Any) -> int:
        """Queues an item; returns its bytes, 0 while the link is down: attached sessions are told of that."""
        if not self.link.is_up:
            return 0
        data = item_to_bytes(self.request, item)
        self.link.send(data, getattr(item, "trace", NO_TRACE).detailed)
        return len(data)

    def _on_up(self) -> None:
        self._up_s = time.monotonic()
        self._tasks = (asyncio.create_task(self._describe()),)

    async def _describe(self) -> None:
        """Requests the description until the peer answers; a compatible peer is used from then on."""
        while self.description is None:
            try:
                description = self._checked(await self._ask())
            except SpecdecError as error:
                is_other = isinstance(error, Mismatch)
                why = "has another tokenizer or protocol version" if is_other else "is not ready yet"
                if isinstance(error, InvalidRequest):
                    why = "sent a malformed description"
                self.absent_reason = f"the {self.name} {why}"
                get_logger().error(f"{self.name} not used", peer=self.address, why=str(error))
                if is_other:  # another process at the address opens another link
                    return
                await asyncio.sleep(DESCRIBE_RETRY_S)
            else:
                self.found(description)

    def found(self, description: Description) -> None:
        """It answered, with a description that is compatible: it is used from now on."""
        self.description, self.model_name, key = description, description.model_name, self._key_of(description)
        if self.model_key and key != self.model_key:
            self._measure_anew()
        self.model_key = key
        self._changed(self)

    @abstractmethod
    def _key_of(self, description: Description) -> ModelKey:
        """Returns what replicas have in common that share their measurements."""

    def _measure_anew(self) -> None:
        """It serves another model: nothing is measured of it."""
        self.goodputs = {}

    @abstractmethod
    def measure_with(self, other: Self | None) -> None:
        """It is connected: measures together with `other`, a connected replica of the same model. Without one, what it
        measured at its start counts until more is measured."""

    async def _ask(self) -> Description:
        method, request = f"/{self.service}/Describe", types_pb.DescribeRequest()
        response = await self.link.ask(method, request, types_pb.DescribeResponse, DESCRIBE_TIMEOUT_S)
        return description_from_message(response)

    def _tell_all(self, event: Event) -> None:
        for listener in list(self._listeners.values()):
            self._tell(listener, event)

    def _tell(self, listener: Listener, event: Event, byte_count: int = 0) -> None:
        try:
            listener.take(event, byte_count)
        except Exception:
            listener.on_defect()
            get_logger().exception("a generation failed", peer=self.address, **listener.names)

    def _checked(self, description: Description) -> Description:
        """Returns the description. Raises Mismatch, naming both sides, if it is incompatible."""
        if description.protocol_version != PROTOCOL_VERSION:
            raise Mismatch(
                f"the {self.name} at {self.address} speaks protocol version {description.protocol_version}, "
                f"this coordinator {PROTOCOL_VERSION}"
            )
        if description.tokenizer_fingerprint != self._fingerprint:
            raise Mismatch(
                f"the tokenizer of the {self.name} at {self.address} ({description.model_name}, fingerprint "
                f"{description.tokenizer_fingerprint[:12]}) is not the coordinator's ({self._fingerprint[:12]}): "
                "draft, target and coordinator must share one"
            )
        return description

    def _on_items(self, messages: Sequence[Any], byte_count: int) -> None:
        share = byte_count // len(messages)
        for message in messages:
            item = item_from_message(message)
            listener = self._listeners.get(item.session)
            if listener is not None:
                self._tell(listener, self._event_of(item), share)
            elif is_farewell(item):
                self._on_stopping()

    @abstractmethod
    def _event_of(self, item: Any) -> Event:
        """Returns what an answer is to its session."""

    def _on_stopping(self) -> None:
        """The peer accepts no more sessions; those it has continue until it ends the link."""
        self.is_stopping, self.absent_reason = True, f"the {self.name} stops and takes no more sessions"
        self._changed(self)
        get_logger().warning(f"{self.name} stops", peer=self.address)

    def _on_down(self, reason: str) -> None:
        for task in self._tasks:
            task.cancel()
        self.description, self.is_stopping, self.is_primed, self.misfit = None, False, False, ""
        self.absent_reason = f"the connection to the {self.name} was lost"
        self.loss_count += reason != CLOSED
        if reason != CLOSED and time.monotonic() - self._up_s < HEALTHY_S:
            self.health.fault(time.monotonic())
        self._changed(self)
