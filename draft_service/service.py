"""The draft replica: the service of `specdec draft`."""

from __future__ import annotations

from typing import Any

from specdec.config import DraftSettings
from specdec.decoding.proposal import Proposal, ProposalRequest, proposals
from specdec.decoding.token_path import TokenPath
from specdec.draft_service.drafter import BRANCH_COUNT, TREE_CELLS, Drafter, DraftFeed
from specdec.engine.cache.kv_cache import BlockTable
from specdec.engine.scheduling.feed import Feed
from specdec.engine.scheduling.scheduler import Engine
from specdec.errors import ConfigError
from specdec.grammar.jobs import MaskThreads
from specdec.protocol.limits import TOKENS_MAX
from specdec.protocol.types import Description, ResolvedSamplingParams, Rule
from specdec.replica.app import OnReady, ReplicaApp, ReplicaKind
from specdec.replica.masks import tokenizer_of, with_masks
from specdec.telemetry.logs import get_logger
from specdec.telemetry.tracing import Tracing
from specdec.v1 import draft_service_pb2 as draft_pb


def sample_feed(table: BlockTable, context_length: int, row_count: int) -> DraftFeed:
    """Returns `row_count` nodes below the committed tokens, or those tokens if it is 0."""
    if not row_count:
        return Feed(table, 0, [0] * context_length, 0, [])
    path, params = (
        TokenPath([0] * context_length, context_length, [0]),
        ResolvedSamplingParams(Rule.GREEDY, 0, 1, temperature=0.0),
    )
    requests = [ProposalRequest(params, path, TOKENS_MAX, (0,), BRANCH_COUNT)] * row_count
    paths = [[context_length + index] for index in range(row_count)]
    return Feed(table, context_length, [0] * row_count, row_count, requests, paths=paths)


def make_drafter(
    engine: Engine[list[ProposalRequest], list[Proposal]], description: Description, settings: Any, tracing: Tracing
) -> Drafter:
    """Returns the service of a loaded draft."""
    vocabulary = engine.model.description.vocabulary
    relation = description.draft_vocabulary_sentence or "the draft proposes every token of its tokenizer"
    get_logger().info("vocabulary", relation=relation)
    retokenizer = vocabulary.retokenizer if vocabulary else None
    if retokenizer is not None and description.has_encoder:
        raise ConfigError(f"{settings.model} has another tokenizer than its target; an encoder-decoder draft must not")
    tokenizer = tokenizer_of(settings.model) if retokenizer is None else lambda: retokenizer.target
    return Drafter(engine, description, tracing, retokenizer, MaskThreads(tokenizer, description.device))


DRAFT: ReplicaKind[list[ProposalRequest], list[Proposal]] = ReplicaKind(
    name="draft",
    service="specdec.v1.DraftService",
    stream_method="Draft",
    messages=(draft_pb.DraftRequest, draft_pb.DraftResponse),
    sampler=with_masks(proposals),
    make_service=make_drafter,
    sample_feed=sample_feed,
    has_stable_rows=False,
    extra_positions=TREE_CELLS,
)


async def run(settings: DraftSettings, on_ready: OnReady | None = None) -> None:
    """Serves until a stop is requested; `on_ready` receives the address once the model serves."""
    await ReplicaApp(DRAFT, settings).run(on_ready)
