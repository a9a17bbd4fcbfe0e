"""One step of the engine: feeds with their rows in, one outcome per feed out.

Runs one forward over all rows, then the sampler over the feeds with logits. An error of one feed fails that feed only:
not-a-number is detected per chunk, and a step that raises is repeated once, feed by feed. Positions become valid in
the cache only after forward and sampler succeeded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

import torch

from specdec.engine.cache.kv_cache import BlockTable, KVCache
from specdec.engine.interface import CausalModel, Chunk, RaggedBatch, StepAbandoned
from specdec.engine.readback import Readback
from specdec.engine.scheduling.feed import Answer, Feed, Payload
from specdec.errors import NumericsError, SpecdecError

logger = logging.getLogger("specdec.engine")

# (payloads, the rows of each, logits, what a device's step found of these rows) -> sampler outputs
Sampler = Callable[[Sequence[Payload], Sequence[int], torch.Tensor, Readback | None], Sequence[Answer]]
# (payloads, the rows of each, their final hidden states if the model returns them, sampler outputs) -> sampler outputs
# with what hidden states add
HiddenReader = Callable[
    [Sequence[Payload], Sequence[Chunk], Sequence[torch.Tensor | None], Sequence[Answer]], Sequence[Answer]
]


# Feeds, each with its rows of one step.
Chosen = Sequence[tuple[Feed[Payload, Answer], Chunk]]


@dataclass(frozen=True, slots=True)
class Computed:
    """Results of the forwards: per feed an error or None, its logits, the hidden states of the same rows if the model
    returns them, and whether all its values are finite.

    `together` is all logits if one forward ran all, `readback` that of the forward. On a GPU, reading a flag waits for
    the forward.
    """

    outcomes: list[SpecdecError | None]
    logits: list[torch.Tensor | None]  # each [logit_count, vocab] float32
    hidden: list[torch.Tensor | None]  # each [logit_count, hidden]
    is_finite: Sequence[bool]
    together: torch.Tensor | None  # [sum of logit counts, vocab] float32
    readback: Readback | None = None

    def kept(self) -> Computed:
        """Returns the same, valid beyond the next forward."""
        logits, hidden = ([None if one is None else one.clone() for one in own] for own in (self.logits, self.hidden))
        return Computed(self.outcomes, logits, hidden, tuple(self.is_finite), None)


@dataclass(frozen=True, slots=True)
class StepReport(Generic[Answer]):
    """One outcome per feed, in order: a SpecdecError, the sampler output, or None for rows without logits.

    `hidden_s`: the part of `sampling_s` in which the hidden states were read; 0 where nothing was wanted of them.
    """

    outcomes: list[Answer | SpecdecError | None]
    forward_s: float
    sampling_s: float
    row_count: int
    hidden_s: float = 0.0


class StepRunner(Generic[Payload, Answer]):
    """Runs steps of one model on one cache. Engine thread only."""

    def __init__(
        self,
        model: CausalModel,
        cache: KVCache,
        sampler: Sampler[Payload, Answer],
        read_hidden: HiddenReader[Payload, Answer] | None = None,
    ):
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._read_hidden = read_hidden
        self._hidden_s = 0.0  # of the step that runs

    @torch.inference_mode()
    def run(
        self, chosen: Chosen[Payload, Answer], should_abandon: Callable[[], bool] | None = None
    ) -> StepReport[Answer]:
        """Runs every feed's rows once. An error of a feed is its outcome and is never raised. Raises StepAbandoned,
        with no rows run, if `should_abandon` says so between two layers."""
        started_s, self._hidden_s = time.perf_counter(), 0.0
        try:
            computed = self._forward(chosen, should_abandon)
        except StepAbandoned:
            for feed, chunk in chosen:
                self._scrub(feed.table, chunk)
            raise
        forward_s = time.perf_counter() - started_s
        outcomes = self._judge(chosen, computed)
        sampling_s = time.perf_counter() - started_s - forward_s
        for (feed, chunk), outcome in zip(chosen, outcomes):
            if not isinstance(outcome, SpecdecError):
                self._cache.advance(feed.table, chunk.base)
        row_count = sum(len(chunk.token_ids) for _, chunk in chosen)
        return StepReport(outcomes, forward_s, sampling_s, row_count, self._hidden_s)

    def warm_up(self) -> None:
        """Runs one token through the model, or through its encoder and its decoder, before the first request. Raises
        the model's errors."""
        own_input = (0,) if self._model.description.has_encoder else ()
        table = self._cache.reserve(1 + len(own_input), own_input)
        try:
            chunk = Chunk(table.block_ids, 0, (*own_input, 0), 1, encoder_length=table.encoder_length)
            with torch.inference_mode():
                self._model.forward(RaggedBatch((chunk,)))
            self._cache.scrub(table, 0, table.capacity)
        finally:
            self._cache.release(table)

    def _forward(self, chosen: Chosen[Payload, Answer], should_abandon: Callable[[], bool] | None = None) -> Computed:
        """Runs all rows in one forward, or each feed's alone if that forward raised."""
        try:
            return self._forward_together(chosen, should_abandon)
        except StepAbandoned:
            raise
        except Exception as error:
            if len(chosen) == 1:
                logger.exception("the forward of one request failed")
                feed, chunk = chosen[0]
                self._scrub(feed.table, chunk)
                return Computed([_as_specdec_error(error)], [None], [None], [True], None)
            logger.warning("a step of %d requests failed (%s); repeating them one by one", len(chosen), error)
        alone = [self._forward([one]).kept() for one in chosen]
        outcomes, logits, hidden, flags = (
            [getattr(one, name)[0] for one in alone] for name in ("outcomes", "logits", "hidden", "is_finite")
        )
        return Computed(outcomes, logits, hidden, flags, None)

    def _forward_together(self, chosen: Chosen[Payload, Answer], should_abandon: Callable[[], bool] | None) -> Computed:
        for feed, chunk in chosen:
            self._cache.prepare_write(feed.table, chunk.cell_end)
        output = self._model.forward(RaggedBatch(tuple(chunk for _, chunk in chosen), should_abandon))
        counts = [chunk.logit_count for _, chunk in chosen]
        logits = [its_logits if count else None for count, its_logits in zip(counts, output.logits.split(counts))]
        hidden: list[torch.Tensor | None] = [None] * len(chosen)
        if output.hidden is not None:
            hidden[:] = output.hidden.split(counts)
        return Computed([None] * len(chosen), logits, hidden, output.is_finite, output.logits, output.readback)

    def _judge(self, chosen: Chosen[Payload, Answer], computed: Computed) -> list[Answer | SpecdecError | None]:
        """Returns the outcomes: for every feed with logits its sampler output, or the error of the sampler.

        The sampler runs before the logits are checked to be finite: the check waits for the device, as does the end of
        the sampler.
        """
        asked = {index: logits for index, logits in enumerate(computed.logits) if logits is not None}
        results: dict[int, Answer | SpecdecError] = {}
        try:
            if asked:
                together = torch.cat(list(asked.values())) if computed.together is None else computed.together
                hidden = [computed.hidden[index] for index in asked]
                its_own = [chosen[index] for index in asked]
                results.update(zip(asked, self._output_of(its_own, together, hidden, computed.readback)))
        except Exception as error:
            logger.warning("sampling for %d requests failed (%s); repeating it one by one", len(asked), error)
            results = {
                i: self._output_alone(chosen[i], asked[i], computed.hidden[i]) for i in asked if computed.is_finite[i]
            }
        outcomes: list[Answer | SpecdecError | None] = list(computed.outcomes)
        for index, (feed, chunk) in enumerate(chosen):
            if outcomes[index] is not None:
                continue
            if not computed.is_finite[index]:
                positions = f"positions {chunk.start} to {chunk.position_max}"
                outcomes[index] = NumericsError(f"not-a-number or infinity at {positions}")
            else:
                outcomes[index] = results.get(index)
            if isinstance(outcomes[index], SpecdecError):
                self._scrub(feed.table, chunk)
        return outcomes

    def _output_of(
        self,
        chosen: Chosen[Payload, Answer],
        logits: torch.Tensor,
        hidden: Sequence[torch.Tensor | None],
        readback: Readback | None = None,
    ) -> Sequence[Answer]:
        payloads = [feed.payload_of(chunk) for feed, chunk in chosen]
        results = self._sampler(payloads, [chunk.logit_count for _, chunk in chosen], logits, readback)
        if len(results) != len(chosen):
            raise ValueError(f"the sampler gave {len(results)} results for {len(chosen)} requests")
        if self._read_hidden is not None:
            started_s, sampled = time.perf_counter(), results
            try:
                results = self._read_hidden(payloads, [chunk for _, chunk in chosen], hidden, results)
            except Exception:  # they decide no text
                logger.exception("no proposals of heads in a step of %d requests", len(chosen))
            self._hidden_s += 0.0 if results is sampled else time.perf_counter() - started_s
        return results

    def _output_alone(
        self, one: tuple[Feed[Payload, Answer], Chunk], logits: torch.Tensor, hidden: torch.Tensor | None
    ) -> Answer | SpecdecError:
        try:
            return self._output_of([one], logits, [hidden])[0]
        except Exception as error:
            logger.exception("the sampling of one request failed")
            return _as_specdec_error(error)

    def _scrub(self, table: BlockTable, chunk: Chunk) -> None:
        """Zeroes the cells that failed rows were written to: not-a-number in a block would outlive its owner."""
        try:
            self._cache.prepare_write(table, chunk.cell_end)
            self._cache.scrub(table, chunk.start, chunk.base)
            for path in chunk.paths:
                self._cache.scrub(table, path[-1], path[-1] + 1)
        except Exception:  # it must not fail the others of its step
            logger.exception("could not make the blocks of a failed request its own")


def _as_specdec_error(error: Exception) -> SpecdecError:
    if isinstance(error, SpecdecError):
        return error
    return SpecdecError(f"{type(error).__name__}: {error}")
