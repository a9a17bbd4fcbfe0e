"""The links to target and draft: the description of each, whether it is usable, and the generation of each answer.

A replica is used once its description is compatible (protocol version, tokenizer); until then, and while the link is
down, `description` is None and `absent_reason` holds the cause for users; addresses and other details are in the log.
A replica that announces its stop gets no new generations; those it serves continue. Generations attach by session
number. A generation whose verification stays unanswered for too long is told so (`Deadlines`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.config import TlsSettings
from specdec.coordinator.deadlines import TICK_S, Deadlines
from specdec.errors import InvalidRequest, Mismatch, ReplicaUnavailable, SpecdecError
from specdec.protocol.items import (
    NO_TRACE,
    DraftAnswer,
    TargetAnswer,
    Verification,
    VerificationResult,
    is_farewell,
)
from specdec.protocol.types import PROTOCOL_VERSION, Description
from specdec.rpc.client import open_channel
from specdec.rpc.convert import description_from_message
from specdec.rpc.convert_items import item_from_message, item_to_bytes
from specdec.rpc.limits import STREAM_RESPONSE_BYTES_MAX
from specdec.rpc.link import CLOSED, Link
from specdec.telemetry.logs import get_logger
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb

DESCRIBE_TIMEOUT_S = 5.0
DESCRIBE_RETRY_S = 0.5
NODES_PER_MESSAGE_MAX = 1 << 12  # twice what fits a message of several items, MESSAGE_BYTES_SOFT


class Listener(Protocol):
    """What a link tells of one session: a generation. Called on the event loop; an exception ends that generation."""

    names: dict[str, object]

    def on_up(self, replica: Replica) -> None:
        """The link is up again."""

    def on_down(self, replica: Replica) -> None:
        """The link was lost."""

    def on_overdue(self, target: Replica, reason: str) -> None:
        """The target has not answered in time."""

    def on_defect(self) -> None:
        """One of the other calls failed."""

    def on_item(self, replica: Replica, item: TargetAnswer | DraftAnswer, byte_count: int) -> None:
        """An answer for the session came, with its share of the message's bytes."""


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """The differences between the link to a draft and the link to a target."""

    name: str
    service: str
    stream_method: str
    request: type
    response: type


TARGET = ReplicaKind("target", "specdec.v1.TargetService", "Verify", target_pb.VerifyRequest, target_pb.VerifyResponse)
DRAFT = ReplicaKind("draft", "specdec.v1.DraftService", "Draft", draft_pb.DraftRequest, draft_pb.DraftResponse)


def check_node_count(count: int) -> None:
    """Raises InvalidRequest for a message with too many nodes, before any is read."""
    if count > NODES_PER_MESSAGE_MAX:
        raise InvalidRequest("nodes", count, f"at most {NODES_PER_MESSAGE_MAX} in one message")


class Replica:
    """One replica and its link, which connects by itself. `fingerprint`: of the tokenizer that it must have."""

    def __init__(
        self, kind: ReplicaKind, address: str, tls: TlsSettings, fingerprint: str, changed: Callable[[], None]
    ) -> None:
        self.kind = kind
        self.address = address
        self.description: Description | None = None
        self.absent_reason = f"the {kind.name} was not reached yet"
        self.is_stopping = False
        self.loss_count = 0  # connections that were lost
        self._fingerprint = fingerprint
        self._changed = changed
        self._listeners: dict[int, Listener] = {}
        self._deadlines = Deadlines()
        self._tasks: tuple[asyncio.Task[None], ...] = ()  # of this connection
        self.link = Link(
            f"the {kind.name} at {address}",
            lambda: open_channel(address, tls, STREAM_RESPONSE_BYTES_MAX, is_patient=True),
            f"/{kind.service}/{kind.stream_method}",
            kind.request,
            kind.response,
            self._on_up,
            self._on_items,
            self._on_down,
        )

    @property
    def is_up(self) -> bool:
        """Whether the replica is usable for new generations."""
        return self.description is not None and not self.is_stopping

    def attach(self, session: int, listener: Listener) -> None:
        """Routes answers for `session` to `listener` from now on."""
        self._listeners[session] = listener

    def detach(self, session: int) -> None:
        """Drops answers for `session` from now on; idempotent."""
        self._listeners.pop(session, None)
        self._deadlines.forget(session)

    def send(self, item: Any) -> int:
        """Queues an item; returns its bytes, 0 while the link is down: `on_down` reports that to attached sessions."""
        if not self.link.is_up:
            return 0
        data = item_to_bytes(self.kind.request, item)
        if isinstance(item, Verification):
            self._deadlines.sent(item)
        self.link.send(data, getattr(item, "trace", NO_TRACE).detailed)
        return len(data)

    def _on_up(self) -> None:
        self._deadlines = Deadlines()
        self._tasks = asyncio.create_task(self._describe()), asyncio.create_task(self._watch())

    async def _describe(self) -> None:
        """Requests the description until the replica answers; a compatible replica is used from then on."""
        while self.description is None:
            try:
                self.description = self._checked(await self._ask())
            except SpecdecError as error:
                is_other = isinstance(error, Mismatch)
                why = "has another tokenizer or protocol version" if is_other else "is not ready yet"
                if isinstance(error, InvalidRequest):
                    why = "sent a malformed description"
                self.absent_reason = f"the {self.kind.name} {why}"
                get_logger().error(f"{self.kind.name} not used", peer=self.address, why=str(error))
                if is_other:  # another process at the address opens another link
                    return
                await asyncio.sleep(DESCRIBE_RETRY_S)
        if self.description.step_times:
            row_count, step_s = self.description.step_times[-1]
            self._deadlines.token_s = step_s / row_count
        self._changed()
        for listener in list(self._listeners.values()):
            self._tell(listener, listener.on_up)

    async def _watch(self) -> None:
        """Ends the generations whose verifications are overdue."""
        while True:
            await asyncio.sleep(TICK_S)
            for session, reason in self._deadlines.tick().items():
                self._deadlines.forget(session)
                if (listener := self._listeners.get(session)) is not None:
                    self._tell(listener, listener.on_overdue, reason)
                get_logger().error("verification overdue", peer=self.address, session=session, reason=reason)

    async def _ask(self) -> Description:
        method, request = f"/{self.kind.service}/Describe", types_pb.DescribeRequest()
        response = await self.link.ask(method, request, types_pb.DescribeResponse, DESCRIBE_TIMEOUT_S)
        return description_from_message(response)

    def _tell(self, listener: Listener, call: Callable[..., None], *arguments: Any) -> None:
        """Calls a listener; an exception ends that generation, not the link and the others."""
        try:
            call(self, *arguments)
        except Exception:
            listener.on_defect()
            get_logger().exception("a generation failed", peer=self.address, **listener.names)

    def _checked(self, description: Description) -> Description:
        """Returns the description. Raises Mismatch, naming both sides, if it is incompatible."""
        if description.protocol_version != PROTOCOL_VERSION:
            raise Mismatch(
                f"the {self.kind.name} at {self.address} speaks protocol version {description.protocol_version}, "
                f"this coordinator {PROTOCOL_VERSION}"
            )
        if description.tokenizer_fingerprint != self._fingerprint:
            raise Mismatch(
                f"the tokenizer of the {self.kind.name} at {self.address} ({description.model_name}, fingerprint "
                f"{description.tokenizer_fingerprint[:12]}) is not the coordinator's ({self._fingerprint[:12]}): "
                "draft, target and coordinator must share one"
            )
        return description

    def _on_items(self, messages: Sequence[Any], byte_count: int) -> None:
        share = byte_count // len(messages)
        if self.kind is DRAFT:
            check_node_count(sum(len(message.nodes.nodes) for message in messages))
        for message in messages:
            item: TargetAnswer | DraftAnswer = item_from_message(message)
            if isinstance(item, VerificationResult):
                self._deadlines.answered(item)
            listener = self._listeners.get(item.session)
            if listener is not None:
                self._tell(listener, listener.on_item, item, share)
            elif is_farewell(item):
                self._on_stopping()

    def _on_stopping(self) -> None:
        """The replica accepts no more sessions; those it has continue until it ends the link."""
        self.is_stopping, self.absent_reason = True, f"the {self.kind.name} stops and takes no more sessions"
        self._changed()
        get_logger().warning(f"{self.kind.name} stops", peer=self.address)

    def _on_down(self, reason: str) -> None:
        for task in self._tasks:
            task.cancel()
        self.description, self.is_stopping = None, False
        self.absent_reason = f"the connection to the {self.kind.name} was lost"
        self.loss_count += reason != CLOSED
        self._changed()
        for listener in list(self._listeners.values()):
            self._tell(listener, listener.on_down)

    def usable(self) -> Description:
        """Returns the description. Raises ReplicaUnavailable with the reason if the replica is not usable."""
        if self.description is None or self.is_stopping:
            raise ReplicaUnavailable(f"no {self.kind.name}: {self.absent_reason}")
        return self.description
