"""An engine on a model that records its batches, and feeds whose outcomes are collected; for tests of its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from specdec.engine.interface import CausalModel, RaggedBatch, StepOutput
from specdec.engine.scheduling.feed import Feed, StepTiming
from specdec.engine.scheduling.scheduler import Engine

TIMEOUT_S = 20.0
VOCABULARY_SIZE = 6


class RecordingModel:
    """Passes batches on to a model and records (start, row count, logit count) of every chunk. In a step that
    may be abandoned, it calls `before_layer` with the number of each layer."""

    def __init__(self, model: CausalModel):
        self.model = model
        self.description = model.description
        self.batches: list[list[tuple[int, int, int]]] = []
        self.fault: Callable[[RaggedBatch], None] = lambda batch: None
        self.before_layer: Callable[[int], None] = lambda layer: None

    def allocate(self, block_count: int, block_size: int) -> object:
        return self.model.allocate(block_count, block_size)

    def forward(self, batch: RaggedBatch) -> StepOutput:
        self.batches.append([(s.start, len(s.token_ids), s.logit_count) for s in batch.chunks])
        self.fault(batch)
        if (should_abandon := batch.should_abandon) is not None:
            layers = count()

            def asked() -> bool:
                self.before_layer(next(layers))
                return should_abandon()

            batch = RaggedBatch(batch.chunks, asked)
        return self.model.forward(batch)


def argmaxes(payloads: list[object], row_counts: list[int], logits: torch.Tensor, *_: object) -> list[object]:
    """SamplerOutput for tests: the payload and the argmax of each of its rows. The payload "bad" raises."""
    if "bad" in payloads:
        raise RuntimeError("planted")
    return [(payload, rows.argmax(-1).tolist()) for payload, rows in zip(payloads, logits.split(row_counts))]


class Bench:
    """An engine with a recording table model, and feeds whose outcomes are collected."""

    def __init__(self, model: CausalModel, sampler: Callable[..., Any] = argmaxes, **limits: int):
        self.model = RecordingModel(model)
        self.engine = Engine(self.model, 256, 8, sampler, **limits)
        self.outcomes: dict[object, object] = {}
        self.timings: dict[object, StepTiming] = {}

    def run(self, function: Callable[[], None], outcome_count: int) -> dict[object, object]:
        """Runs `function` on the engine thread and waits for `outcome_count` outcomes."""
        self.outcomes, self.complete = {}, threading.Event()
        self.wanted = outcome_count
        self.engine.post(function)
        assert self.complete.wait(TIMEOUT_S), f"only {self.outcomes} arrived"
        return self.outcomes

    def settle(self, name: object, outcome: object) -> None:
        self.outcomes[name] = outcome
        if len(self.outcomes) == self.wanted:
            self.complete.set()

    def feed(self, name: object, token_ids: list[int], logit_count: int = 1, **fields: object) -> Feed:
        table = fields.pop("table", None) or self.engine.cache.reserve(120)

        def done(result: object, timing: StepTiming) -> None:
            self.timings[name] = timing
            self.settle(name, result)

        feed = Feed(
            table=table,
            start_position=table.length,
            token_ids=token_ids,
            logit_count=logit_count,
            payload=fields.pop("payload", name),
            done=done,
            failed=lambda error: self.settle(name, error),
            **fields,
        )
        self.engine.submit(feed)
        return feed
