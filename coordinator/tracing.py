"""What a generation tells of itself to be traced, and who listens: nobody, unless the request is sampled.

`GenerationTrace` is told of everything and does nothing; `RequestTrace` (request_trace.py) makes spans of it. Whether a
request is recorded is decided once, when it comes (`open_trace` there), and travels to the replicas in the items.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.errors import SpecdecError
from specdec.protocol.items import EvidenceAnswer, Nodes, Trace
from specdec.protocol.report import Finished, Started
from specdec.protocol.request import Ask
from specdec.protocol.session import Session
from specdec.protocol.types import Description
from specdec.telemetry.spans import AttributeValue

if TYPE_CHECKING:
    from coordinator.replicas import Replica
    from specdec.rpc.link import Link


class GenerationTrace:
    """A generation that is not recorded: only its ids are known. Every method may be called at any time."""

    def __init__(self, context: Trace, request_id: str) -> None:
        self.context = context
        self.request_id = request_id

    def admitted(self, ask: Ask, started: Started, target: Description) -> None:
        """The request was found right."""

    def began(self, session: Session) -> None:
        """The session is about to be opened and its prompt to be read."""

    def sent(self, session: Session, now_s: float) -> None:
        """The verification in flight is sent; said again when it is sent again."""

    def nodes(self, session: Session, nodes: Nodes, link: Link) -> None:
        """The draft sent nodes, and the session has filed those it can use."""

    def answered(self) -> None:
        """Evidence is here; what follows is this process's own work."""

    def verdict(self, session: Session, answer: EvidenceAnswer, now_s: float, waited_s: float, ends: bool) -> None:
        """A verdict is about to be committed; `waited_s`: the round was held back for draft tokens so long."""

    def committed(self, session: Session, link: Link) -> None:
        """The verdict is committed, and nothing of what follows is carried out yet; `link` is the target's."""

    def note(self, name: str, **attributes: AttributeValue) -> None:
        """Something happened beside the rounds."""

    def finished(self, session: Session, finished: Finished) -> None:
        """The text ended."""

    def failed(self, error: SpecdecError) -> None:
        """The generation is given up."""

    def left(self, session: Session, draft: Replica | None) -> None:
        """The session is over on all sides; `draft` may still have something on the way for it."""

    def closed(self) -> None:
        """The call is over. Nothing is told after it but what the draft had on the way."""
