"""The draft replica: what `specdec draft` runs."""

from __future__ import annotations

from draft_service.cells import Cells
from draft_service.drafter import BRANCH_COUNT, TREE_CELLS, Drafter
from specdec.config import DraftSettings
from specdec.decoding.paths import TokenPath
from specdec.decoding.proposal import Proposal, ProposalRequest, proposals
from specdec.engine.block_table import BlockTable
from specdec.engine.runner import Piece
from specdec.protocol.types import TOKENS_MAX, Law, Rule
from specdec.replica.app import OnReady, ReplicaApp, ReplicaKind
from specdec.v1 import draft_service_pb2 as draft_pb


def sample_piece(table: BlockTable, context_length: int, row_count: int) -> Piece[list[ProposalRequest]]:
    """So many nodes below the committed tokens, or those tokens."""
    cells = Cells(table.capacity)
    context = [cells.take(position) for position in range(context_length)]
    if not row_count:
        return Piece(table, 0, [0] * context_length, 0, [], cells.chain(context))
    cells.commit(context)
    rows = cells.nodes([[cells.take(context_length)] for _ in range(row_count)])
    path, law = TokenPath([0] * context_length, context_length, [0]), Law(Rule.GREEDY, 0, 1, 0.0)
    requests = [ProposalRequest(law, path, TOKENS_MAX, 0, BRANCH_COUNT)] * row_count
    return Piece(table, 0, [0] * row_count, row_count, requests, rows)


DRAFT: ReplicaKind[list[ProposalRequest], list[Proposal]] = ReplicaKind(
    name="draft",
    service="specdec.v1.DraftService",
    stream_method="Draft",
    messages=(draft_pb.DraftRequest, draft_pb.DraftResponse),
    evidence=proposals,
    make_service=lambda engine, description, settings, tracing: Drafter(engine, description, tracing),
    sample_piece=sample_piece,
    has_stable_rows=False,
    extra_positions=TREE_CELLS,
)


async def run(settings: DraftSettings, on_ready: OnReady | None = None) -> None:
    """Serves until told to stop; `on_ready` is given the address once the model serves."""
    await ReplicaApp(DRAFT, settings).run(on_ready)
