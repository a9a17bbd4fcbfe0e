"""One generation as what a turn measured, and ratios of sums over turns, of all texts together."""

from __future__ import annotations

import uuid

from bench.results import Cell, Ratio, Results
from bench.runner import Values
from specdec.advise.forecast import resampled, share
from specdec.client.run import Run
from specdec.protocol.types import TokenKind
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc

TIMEOUT_S = 600.0


def generate(
    stub: pb_grpc.CoordinatorServiceStub, request: pb.GenerateRequest, salt: str = ""
) -> tuple[Values, tuple[int, ...]]:
    """Returns what a generation measured, and its token ids. It has a cache salt of its own by default, so that no
    store holds its text. Tokens, steps and seconds are those after the first token; `tested`: accepted draft tokens,
    and those refused whose predecessors were accepted. Raises grpc.RpcError."""
    request.cache_salt = salt or uuid.uuid4().hex
    run = Run.of(stub.Generate(request, timeout=TIMEOUT_S))
    time, later = run.statistics.time, len(run.token_ids) - 1
    seconds = time.total_s - time.time_to_first_token_s
    kinds = [kind for _, kind in run.pieces]
    accepted = kinds.count(TokenKind.ACCEPTED)
    values = {
        "tokens_per_s": later / seconds if later else 1 / time.total_s,
        "tokens": later,
        "steps": run.statistics.rounds - 1,
        "seconds": seconds,
        "accepted": accepted,
        "tested": accepted + kinds.count(TokenKind.RECOVERED),
    }
    return values, tuple(run.token_ids)


def pooled(results: Results, cell: Cell, variant: str, part: str, whole: str) -> float | None:
    """Returns the sum of one measure over that of another, such as tokens of a step; None where not measured."""
    own = results.samples(cell).get(variant)
    return share([sum(own[part]), sum(own[whole])]) if own else None


def pooled_ratio(
    results: Results, cell: Cell, variant: str, over: str, part: str = "tokens", whole: str = "steps"
) -> Ratio | None:
    """Returns that of one variant over that of another, with its interval by bootstrap over turns."""
    samples = results.samples(cell)
    if variant not in samples or over not in samples:
        return None
    columns = [samples[name][measure] for name in (variant, over) for measure in (part, whole)]
    turns = list(zip(*columns))
    found = resampled(turns, lambda sums: share(sums[:2]) / (share(sums[2:]) or 1.0))
    return Ratio(found.value, found.low, found.high, len(turns))
