"""The links to target and draft: what each serves, whether it may be used, and which generation an answer is for.

A replica is used from the moment its description fits (protocol version, tokenizer); until then, and while the link is
down, `description` is None and `absent_reason` says why. One that says that it stops is not used for new generations;
those it serves go on. Generations attach by session number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec.config import TlsSettings
from specdec.errors import Mismatch, ReplicaUnavailable, SpecdecError
from specdec.protocol.items import NO_TRACE, DraftAnswer, TargetAnswer, is_farewell
from specdec.protocol.types import PROTOCOL_VERSION, Description
from specdec.rpc.client import call_unary, open_channel
from specdec.rpc.convert import description_from_message
from specdec.rpc.convert_items import item_from_message, item_to_bytes
from specdec.rpc.link import CLOSED, Link
from specdec.telemetry.logs import get_logger
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb

if TYPE_CHECKING:
    from coordinator.decode_loop import Generation

DESCRIBE_TIMEOUT_S = 5.0
DESCRIBE_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """What tells the link to a draft from the link to a target."""

    name: str
    service: str
    stream_method: str
    request: type
    response: type


TARGET = ReplicaKind("target", "specdec.v1.TargetService", "Verify", target_pb.VerifyRequest, target_pb.VerifyResponse)
DRAFT = ReplicaKind("draft", "specdec.v1.DraftService", "Draft", draft_pb.DraftRequest, draft_pb.DraftResponse)


class Replica:
    """One replica, connected to by itself. `fingerprint` is the tokenizer's it must have."""

    def __init__(
        self, kind: ReplicaKind, address: str, tls: TlsSettings, fingerprint: str, changed: Callable[[], None]
    ) -> None:
        self.kind = kind
        self.address = address
        self.description: Description | None = None
        self.absent_reason = f"the {kind.name} at {address} was not reached yet"
        self.is_stopping = False
        self.loss_count = 0  # connections that were lost
        self._tls = tls
        self._fingerprint = fingerprint
        self._changed = changed
        self._listeners: dict[int, Generation] = {}
        self._describing: asyncio.Task[None] | None = None
        self.link = Link(
            f"the {kind.name} at {address}",
            lambda: open_channel(address, tls),
            f"/{kind.service}/{kind.stream_method}",
            kind.request,
            kind.response,
            self._on_up,
            self._on_items,
            self._on_down,
        )

    @property
    def is_up(self) -> bool:
        """Whether it may be used for new generations."""
        return self.description is not None and not self.is_stopping

    def attach(self, session: int, listener: Generation) -> None:
        """Answers for `session` go to `listener` from here on."""
        self._listeners[session] = listener

    def detach(self, session: int) -> None:
        """Answers for `session` go nowhere from here on; idempotent."""
        self._listeners.pop(session, None)

    def send(self, item: Any) -> int:
        """Queues an item; returns its bytes, 0 while the link is down: attached sessions are told by `on_down`."""
        if not self.link.is_up:
            return 0
        data = item_to_bytes(self.kind.request, item)
        self.link.send(data, getattr(item, "trace", NO_TRACE).detailed)
        return len(data)

    def _on_up(self) -> None:
        self._describing = asyncio.create_task(self._describe())

    async def _describe(self) -> None:
        """Asks what the replica serves, again while it does not answer; it is used from here on when that fits."""
        while self.description is None:
            try:
                self.description = self._checked(await self._ask())
            except SpecdecError as error:
                self.absent_reason = str(error)
                get_logger().error(f"{self.kind.name} not used", peer=self.address, why=str(error))
                if isinstance(error, Mismatch):  # another process at the address will mean another link
                    return
                await asyncio.sleep(DESCRIBE_RETRY_S)
        self._changed()
        for listener in list(self._listeners.values()):
            self._tell(listener, listener.on_up)

    async def _ask(self) -> Description:
        method, request = f"/{self.kind.service}/Describe", types_pb.DescribeRequest()
        async with open_channel(self.address, self._tls) as channel:
            told = await call_unary(channel, method, request, types_pb.DescribeResponse, DESCRIBE_TIMEOUT_S)
            return description_from_message(told)

    def _tell(self, listener: Generation, call: Callable[..., None], *arguments: Any) -> None:
        """Calls a listener; its exception costs that generation, not the link and all others."""
        try:
            call(self, *arguments)
        except Exception:
            get_logger().exception("a generation failed", peer=self.address, **listener.names)
            listener.on_defect()

    def _checked(self, description: Description) -> Description:
        """The same. Raises Mismatch, naming both sides, where it does not fit."""
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
        for message in messages:
            item: TargetAnswer | DraftAnswer = item_from_message(message)
            listener = self._listeners.get(item.session)
            if listener is not None:
                self._tell(listener, listener.on_item, item, share)
            elif is_farewell(item):
                self._on_stopping(item.message)

    def _on_stopping(self, sentence: str) -> None:
        """The replica takes no more sessions; those it has go on until it ends the link."""
        self.is_stopping, self.absent_reason = True, f"the {self.kind.name} at {self.address}: {sentence}"
        get_logger().warning(f"{self.kind.name} stops", peer=self.address)
        self._changed()

    def _on_down(self, reason: str) -> None:
        if self._describing is not None:
            self._describing.cancel()
        self.description, self.is_stopping = None, False
        self.absent_reason = reason
        self.loss_count += reason != CLOSED
        self._changed()
        for listener in list(self._listeners.values()):
            self._tell(listener, listener.on_down, reason)

    def usable(self) -> Description:
        """What it serves. Raises ReplicaUnavailable with the reason when it may not be used."""
        if self.description is None or self.is_stopping:
            raise ReplicaUnavailable(f"no {self.kind.name}: {self.absent_reason}")
        return self.description
