"""The target replica: what `specdec target` runs."""

from __future__ import annotations

from specdec.config import TargetSettings
from specdec.decoding.evidence import evidence
from specdec.replica.app import OnReady, ReplicaApp, ReplicaKind
from specdec.replica.stream import StreamMessages
from specdec.v1 import target_service_pb2 as target_pb
from target_service.verifier import Verifier

TARGET = ReplicaKind(
    name="target",
    service="specdec.v1.TargetService",
    stream_method="Verify",
    messages=StreamMessages(target_pb.VerifyRequest, target_pb.VerifyResponse, target_pb.VerifyResponseItem),
    evidence=evidence,
    make_handler=Verifier,
)


async def run(settings: TargetSettings, on_ready: OnReady | None = None) -> None:
    """Serves until told to stop; `on_ready` is given the address once the model serves."""
    await ReplicaApp(TARGET, settings).run(on_ready)
