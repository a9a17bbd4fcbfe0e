"""Generations of variants in turns, and the services they run on.

Each generation has a cache salt of its own, unless a salt is given, so that no store holds its text; texts that end in
a cycle are counted apart.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from bench.pipeline.samples import ends_in_cycle
from bench.pipeline.variants import OFF
from bench.results import Ratio, ratio_of
from specdec.advise.forecast import Estimate, resampled, share
from specdec.client.run import Run
from specdec.launch.children import start
from specdec.protocol.types import TokenKind
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.harness import running

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Text:
    """One generation: tokens per second after the first, tokens per round, and its token ids. `tested`: accepted draft
    tokens, and all whose predecessors were."""

    tokens_per_s: float
    tokens_per_round: float
    token_ids: tuple[int, ...]
    statistics: pb.Statistics
    tested: tuple[int, int] = (0, 0)

    @property
    def is_cyclic(self) -> bool:
        return ends_in_cycle(self.token_ids)


@dataclass(slots=True)
class Found:
    """The texts of variants by prompt, in turns."""

    texts: dict[str, dict[str, Text]] = field(default_factory=dict)

    def add(self, variant: str, prompt: str, text: Text) -> None:
        self.texts.setdefault(variant, {})[prompt] = text

    def of(self, prompts: Collection[str]) -> Found:
        """The texts of these prompts, of variants that have one: not every variant has one of every prompt."""
        own = {
            variant: {name: text for name, text in texts.items() if name in prompts}
            for variant, texts in self.texts.items()
        }
        return Found({variant: texts for variant, texts in own.items() if texts})

    def ratio(self, variant: str, over: str, of: Callable[[Text], float], cyclic: bool | None = False) -> Ratio | None:
        """A variant over another, prompt by prompt; `cyclic` None: all texts, else by whether plain text cycles."""
        both = self.texts[variant], self.texts[over]
        plain = self.texts.get(OFF.name, both[1])
        names = [name for name in both[0] if cyclic is None or plain[name].is_cyclic is cyclic]
        values = [of(both[0][name]) / of(both[1][name]) for name in names if of(both[1][name])]
        return ratio_of(values) if values else None


def per_second(text: Text) -> float:
    return text.tokens_per_s


def whole_per_second(text: Text) -> float:
    """Tokens per second of the whole text, what comes before the first token included."""
    return len(text.token_ids) / text.statistics.time.total_s


def per_round(text: Text) -> float:
    return text.tokens_per_round


def steps_of(text: Text) -> list[float]:
    """Tokens and steps of a text after the first."""
    return [len(text.token_ids) - 1, max(1, text.statistics.rounds - 1)]


def seconds_of(text: Text) -> list[float]:
    """Tokens and seconds of a text after the first."""
    return [len(text.token_ids) - 1, (len(text.token_ids) - 1) / text.tokens_per_s]


def pooled(found: Found, variant: str, of: Callable[[Text], list[float]]) -> float:
    """Tokens of a step, or a second, over all texts together, as the acceptance of `measure_ranks` is over all
    positions."""
    return share([sum(column) for column in zip(*map(of, found.texts[variant].values()))])


def pooled_ratio(found: Found, variant: str, over: str, of: Callable[[Text], list[float]]) -> Estimate:
    """That of one variant over that of another."""
    groups = [of(text) + of(found.texts[over][name]) for name, text in found.texts[variant].items()]
    return resampled(groups, lambda sums: share(sums[:2]) / share(sums[2:]))


def shown(ratio: Estimate) -> str:
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def generate(stub: pb_grpc.CoordinatorServiceStub, request: pb.GenerateRequest, salt: str = "") -> Text:
    """Runs one generation, in a salt of its own by default. Raises grpc.RpcError."""
    request.cache_salt = salt or uuid.uuid4().hex
    run = Run.of(stub.Generate(request, timeout=TIMEOUT_S))
    counts, time, token_ids = run.statistics, run.statistics.time, tuple(run.token_ids)
    seconds = time.total_s - time.time_to_first_token_s
    rate = (len(token_ids) - 1) / seconds if seconds > 0 else 0.0
    kinds = [kind for _, kind in run.pieces]
    accepted = kinds.count(TokenKind.ACCEPTED)
    tested = accepted, accepted + kinds.count(TokenKind.RECOVERED)
    return Text(rate, (len(token_ids) - 1) / max(1, counts.rounds - 1), token_ids, counts, tested)


@contextmanager
def served(
    folder: Path, draft: Path | None, *coordinators: dict[str, Any], draft_dtype: str = "float32"
) -> Iterator[list[Any]]:
    """Yields a stub for each coordinator; all share one target in bfloat16 and one draft, with one thread each."""
    own = {"speculation_policy": "auto"}, {"dtype": draft_dtype}
    with running(folder, draft, *own, threads=1, dtype="bfloat16") as services:
        stubs = [pb_grpc.CoordinatorServiceStub(grpc.insecure_channel(services.coordinator.address))]
        children = []
        try:
            for changed in coordinators:
                children.append(start("coordinator", services.settings.model_copy(update=changed)))
                children[-1].wait_ready()
                stubs.append(pb_grpc.CoordinatorServiceStub(grpc.insecure_channel(children[-1].address)))
            yield stubs
        finally:
            for child in children:
                child.stop()


def median_of(found: Found, variant: str, of: Callable[[Text], float]) -> float:
    return ratio_of([of(text) for text in found.texts[variant].values()]).median
