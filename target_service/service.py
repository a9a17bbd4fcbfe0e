"""The target replica: what `specdec target` runs."""

from __future__ import annotations

import os
import sys

import torch

from specdec.config import TargetSettings
from specdec.decoding.evidence import EvidenceRequest, evidence
from specdec.engine.block_table import BlockTable
from specdec.engine.parallel.place import RankPlace
from specdec.engine.runner import Piece
from specdec.protocol.types import Evidence, Law, Rule
from specdec.replica.app import SWITCH_INTERVAL_S, OnReady, ReplicaApp, ReplicaKind, device
from specdec.telemetry.logs import configure_logs
from specdec.v1 import target_service_pb2 as target_pb
from target_service.verifier import Verifier


def sample_piece(table: BlockTable, context_length: int, row_count: int) -> Piece[EvidenceRequest]:
    """A verification of `row_count` - 1 draft tokens, or the context before it."""
    request = EvidenceRequest(Law(Rule.GREEDY, 0, 1, 0.0), 0, [0] * (context_length + 1), (0,) * (row_count - 1))
    if not row_count:
        return Piece(table, 0, [0] * context_length, 0, request)
    return Piece(table, context_length, [0] * row_count, row_count, request)


TARGET: ReplicaKind[EvidenceRequest, Evidence] = ReplicaKind(
    name="target",
    service="specdec.v1.TargetService",
    stream_method="Verify",
    messages=(target_pb.VerifyRequest, target_pb.VerifyResponse),
    evidence=evidence,
    make_service=lambda engine, description, settings, tracing: Verifier(
        engine, description, settings.enable_prefix_caching, tracing
    ),
    sample_piece=sample_piece,
)


async def run(settings: TargetSettings, on_ready: OnReady | None = None) -> None:
    """Serves until told to stop; `on_ready` is given the address once the model serves."""
    await ReplicaApp(TARGET, settings).run(on_ready)


async def run_rank(settings: TargetSettings, place: RankPlace, on_ready: OnReady | None = None) -> None:
    """One rank of a target that is several processes: rank 0 serves like `run`, the others do what it says.

    All a launcher calls, in each process it starts: of `settings` every rank needs the same, but for where the model
    lies and its device. Returns when rank 0 was told to stop; ends the process when a rank is lost.
    """
    if place.rank == 0:
        await ReplicaApp(TARGET, settings, place).run(on_ready)
        return
    from specdec.engine.parallel.rank import ModelSource, run_follower

    configure_logs(settings.log_level, TARGET.name)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    run_follower(ModelSource(settings.model, settings.dtype, device(settings.device, place.local_rank)), place)
