"""The draft replica: what `specdec draft` runs."""

from __future__ import annotations

from draft_service.drafter import TREE_CELLS, Drafter
from specdec.config import DraftSettings
from specdec.decoding.proposal import proposals
from specdec.engine.scheduler import Engine
from specdec.protocol.types import Description
from specdec.replica.app import OnReady, ReplicaApp, ReplicaKind
from specdec.replica.stream import StreamMessages
from specdec.telemetry.tracing import Tracing
from specdec.v1 import draft_service_pb2 as draft_pb


def make_drafter(engine: Engine, description: Description, settings: DraftSettings, tracing: Tracing) -> Drafter:
    """What works for the sessions of a draft."""
    return Drafter(engine, description, tracing)


DRAFT = ReplicaKind(
    name="draft",
    service="specdec.v1.DraftService",
    stream_method="Draft",
    messages=StreamMessages(draft_pb.DraftRequest, draft_pb.DraftResponse, draft_pb.DraftResponseItem),
    evidence=proposals,
    make_service=make_drafter,
    has_stable_rows=False,
    extra_positions=TREE_CELLS,
)


async def run(settings: DraftSettings, on_ready: OnReady | None = None) -> None:
    """Serves until told to stop; `on_ready` is given the address once the model serves."""
    await ReplicaApp(DRAFT, settings).run(on_ready)
