"""The target replica: the service of `specdec target`."""

from __future__ import annotations

import sys

from specdec.config import TargetSettings
from specdec.decoding.prompt_logprobs import TargetOutput, TargetWork, with_prompt_rows
from specdec.decoding.verification import VerificationRequest, verify
from specdec.engine.cache.kv_cache import BlockTable
from specdec.engine.loading.devices import prepare_libraries
from specdec.engine.parallel.rank_config import RankPlace
from specdec.engine.scheduling.feed import Feed
from specdec.grammar.jobs import MaskThreads
from specdec.protocol.types import ResolvedSamplingParams, Rule
from specdec.replica.app import SWITCH_INTERVAL_S, OnReady, ReplicaApp, ReplicaKind, device
from specdec.replica.masks import tokenizer_of, with_masks
from specdec.target_service.heads import load_head_proposer
from specdec.target_service.verifier import Verifier
from specdec.telemetry.logs import configure_logs
from specdec.v1 import target_service_pb2 as target_pb


def sample_feed(table: BlockTable, context_length: int, row_count: int) -> Feed[TargetWork, TargetOutput]:
    """Returns a verification of `row_count` - 1 draft tokens that wants the proposals of heads, or its context if
    `row_count` is 0."""
    params, committed = ResolvedSamplingParams(Rule.GREEDY, 0, 1, temperature=0.0), [0] * (context_length + 1)
    request = VerificationRequest(params, 0, committed, (0,) * (row_count - 1), wants_heads=True)
    if not row_count:
        return Feed(table, 0, [0] * context_length, 0, request)
    return Feed(table, context_length, [0] * row_count, row_count, request)


TARGET: ReplicaKind[TargetWork, TargetOutput] = ReplicaKind(
    name="target",
    service="specdec.v1.TargetService",
    stream_method="Verify",
    messages=(target_pb.VerifyRequest, target_pb.VerifyResponse),
    sampler=with_prompt_rows(with_masks(verify)),
    make_service=lambda engine, description, settings, tracing: Verifier(
        engine,
        description,
        settings.enable_prefix_caching,
        tracing,
        MaskThreads(tokenizer_of(settings.model), description.device),
    ),
    sample_feed=sample_feed,
    make_hidden_reader=load_head_proposer,
)


async def run(settings: TargetSettings, on_ready: OnReady | None = None) -> None:
    """Serves until a stop is requested; `on_ready` receives the address once the model serves."""
    await ReplicaApp(TARGET, settings).run(on_ready)


async def run_rank(settings: TargetSettings, place: RankPlace, on_ready: OnReady | None = None) -> None:
    """Runs one rank of a target of several processes: rank 0 serves like `run`, the others follow it.

    The only function a launcher calls, in each process it starts. `settings` are the same for every rank, except the
    model's path and the device. Returns when rank 0 stops; ends the process when a rank is lost.
    """
    if place.rank == 0:
        await ReplicaApp(TARGET, settings, place).run(on_ready)
        return
    from specdec.engine.parallel.rank import ModelSource, run_follower

    configure_logs(settings.log_level, TARGET.name)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    prepare_libraries(settings.threads)
    own = device(settings.device, place.local_rank)
    source = ModelSource(settings.model, settings.dtype, own, settings.max_model_len, settings.symmetric_memory)
    run_follower(source, place)
