"""Plain decoding of many streams by the engine in its own thread: throughput, and the parts of a step's time.

Every stream submits its next token from within the callback of the last one, as the target service does, with the
target's sampler and nothing else. The time of a step beside forward pass and sampler is scheduling, preparing the cache
and delivering results.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.engine.steps import BLOCK_SIZE
from specdec.decoding.verification import VerificationRequest, verify
from specdec.engine.cache.kv_cache import BlockTable
from specdec.engine.scheduling.feed import Feed, StepTiming
from specdec.engine.scheduling.scheduler import Engine
from specdec.engine.transformers_model import TransformersModel
from specdec.errors import SpecdecError
from specdec.protocol.types import ResolvedSamplingParams, Rule, SamplerOutput

STREAMS = (1, 4, 16, 32)
CONTEXT = 128  # tokens of a prompt


@dataclass(frozen=True, slots=True)
class StreamMeasurement:
    """Medians over blocks of `streams` concurrent streams, all together; times are of one step."""

    model: str
    dtype: str
    streams: int
    tokens_per_s: float
    step_ms: float
    forward_ms: float
    sampling_ms: float
    outside_ms: float


@dataclass(frozen=True, slots=True)
class Block:
    """One block of decoding: its rate, and (seconds, forward, sampler) of every step but the first."""

    tokens_per_s: float
    steps_s: tuple[tuple[float, float, float], ...]


class Streams:
    """An engine whose streams decode in blocks of `token_count` tokens each, then end."""

    def __init__(self, model: TransformersModel, stream_count_max: int, token_count: int) -> None:
        self._token_count = token_count
        self._capacity = CONTEXT + token_count
        generator = torch.Generator().manual_seed(0)
        self._prompts = torch.randint(
            1, model.description.vocabulary_size, (stream_count_max, CONTEXT), generator=generator
        ).tolist()
        block_count = 1 + stream_count_max * -(-self._capacity // BLOCK_SIZE)
        self._engine = Engine(model, block_count, BLOCK_SIZE, verify)
        self.texts: list[list[int]] = []  # of the last block
        self._engine.start()

    @property
    def free_share(self) -> float:
        """Share of the cache that no stream holds; to be read between blocks."""
        return 1 - self._engine.cache.usage

    def stop(self) -> None:
        """Ends the engine's thread."""
        self._engine.stop()

    def block(self, stream_count: int) -> Block:
        """Prompts first, which are not timed, then all streams at once. Raises what the engine says of a feed."""
        run = _Run(self._engine, self._token_count, stream_count)
        self._engine.post(lambda: run.begin(self._prompts[:stream_count], self._capacity))
        block = run.result()
        self.texts = run.texts
        return block


class _Run:
    """The streams of one block; everything but `result` happens on the engine's thread."""

    def __init__(self, engine: Engine[VerificationRequest, SamplerOutput], token_count: int, stream_count: int) -> None:
        self._engine = engine
        self._token_count = token_count
        self._waiting_count = stream_count  # streams whose prompt, and later whose last token, is still to come
        self._texts: dict[BlockTable, list[int]] = {}
        self._started_s = self._ended_s = self._step_s = 0.0
        self._steps_s: list[tuple[float, float, float]] = []
        self._finished = threading.Event()
        self._error: SpecdecError | None = None

    def begin(self, prompts: Sequence[list[int]], capacity: int) -> None:
        for prompt in prompts:
            table = self._engine.cache.reserve(capacity)
            self._texts[table] = list(prompt)
            self._submit(table, self._prompt_done)

    def result(self) -> Block:
        self._finished.wait()
        if self._error is not None:
            raise self._error
        count = len(self._texts) * self._token_count
        return Block(count / (self._ended_s - self._started_s), tuple(self._steps_s))

    @property
    def texts(self) -> list[list[int]]:
        """Prompt and decoded tokens of every stream."""
        return list(self._texts.values())

    def _submit(self, table: BlockTable, done: Callable[[BlockTable, SamplerOutput, StepTiming], None]) -> None:
        text = self._texts[table]
        params = ResolvedSamplingParams(Rule.GREEDY, 0, CONTEXT, temperature=0)
        self._engine.submit(
            Feed(
                table=table,
                start_position=table.length,
                token_ids=text[table.length :],
                logit_count=1,
                payload=VerificationRequest(params, len(text) - CONTEXT, text),
                done=lambda answer, timing: done(table, answer, timing),
                failed=self._fail,
            )
        )

    def _fail(self, error: SpecdecError) -> None:
        self._error = error
        self._finished.set()

    def _prompt_done(self, table: BlockTable, answer: SamplerOutput, timing: StepTiming) -> None:
        self._take(table, answer)
        self._waiting_count -= 1
        if self._waiting_count == 0:
            self._waiting_count = len(self._texts)
            self._started_s = time.perf_counter()
            for waiting in self._texts:
                self._submit(waiting, self._token_done)

    def _token_done(self, table: BlockTable, answer: SamplerOutput, timing: StepTiming) -> None:
        if table is next(iter(self._texts)):
            before_s, self._step_s = self._step_s, time.perf_counter()
            if before_s:
                self._steps_s.append((self._step_s - before_s, timing.forward_s, timing.sampling_s))
        self._take(table, answer)
        if len(self._texts[table]) <= CONTEXT + self._token_count:
            self._submit(table, self._token_done)
            return
        self._ended_s = time.perf_counter()
        self._waiting_count -= 1
        if self._waiting_count == 0:
            for finished in self._texts:
                self._engine.cache.release(finished)
            self._finished.set()

    def _take(self, table: BlockTable, answer: SamplerOutput) -> None:
        self._texts[table].append(answer.recovered_token_ids[0])


def measure_streams(
    model: TransformersModel,
    name: str,
    stream_counts: Sequence[int],
    token_count: int,
    rounds: int,
    advance: Callable[[], None] = lambda: None,
) -> list[StreamMeasurement]:
    """Returns one measurement per count; counts take turns, once a round. `advance` is called after each round."""
    streams = Streams(model, max(stream_counts), token_count)
    blocks: dict[int, list[Block]] = {count: [] for count in stream_counts}
    try:
        for _ in range(rounds):
            for count, found in blocks.items():
                found.append(streams.block(count))
            advance()
    finally:
        streams.stop()
    return [measurement_of(name, model.description.dtype, count, found) for count, found in blocks.items()]


def measurement_of(name: str, dtype: str, stream_count: int, blocks: Sequence[Block]) -> StreamMeasurement:
    """The medians of some blocks."""
    steps_s = [step for block in blocks for step in block.steps_s]
    step_ms, forward_ms, sampling_ms = (statistics.median(part) * 1e3 for part in zip(*steps_s))
    outside_ms = statistics.median(step_s - forward_s - own_s for step_s, forward_s, own_s in steps_s) * 1e3
    rate = statistics.median(block.tokens_per_s for block in blocks)
    return StreamMeasurement(name, dtype, stream_count, rate, step_ms, forward_ms, sampling_ms, outside_ms)


def gain(measurements: Sequence[StreamMeasurement], model: str, dtype: str, streams: int) -> float | None:
    """Tokens per second of `streams` streams over those of one; None if either was not measured."""
    rates = {
        measurement.streams: measurement.tokens_per_s
        for measurement in measurements
        if (measurement.model, measurement.dtype) == (model, dtype)
    }
    return rates[streams] / rates[1] if streams in rates and 1 in rates else None
