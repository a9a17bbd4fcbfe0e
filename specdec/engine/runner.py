"""One step of the engine: pieces of sequences in, one outcome per piece out.

Runs one forward over all pieces, then the sampler over those with logits. An error of one piece fails that piece only:
not-a-number is detected per chunk, and a step that raises is repeated once, piece by piece. Positions become valid in
the cache only after forward and sampler succeeded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar, overload

import torch

from specdec.engine.interface import CausalModel, RaggedBatch, SequenceChunk, StepAbandoned, TreeRows
from specdec.engine.kv_cache import BlockTable, BranchBlocks, KVCache
from specdec.errors import NumericsError, SpecdecError

logger = logging.getLogger("specdec.engine")

Payload = TypeVar("Payload")  # input of the sampler for one piece
Answer = TypeVar("Answer")  # the sampler output for one piece
Sampler = Callable[[Sequence[Payload], Sequence[int], torch.Tensor], Sequence[Answer]]
# (payloads, hidden states of the rows of each, sampler outputs) -> sampler outputs with what hidden states add
HiddenReader = Callable[[Sequence[Payload], Sequence[torch.Tensor], Sequence[Answer]], Sequence[Answer]]


class BranchRows(NamedTuple):
    """Tokens of a further path of a sequence from position `start` on, and its blocks."""

    blocks: BranchBlocks
    start: int
    token_ids: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Piece(Generic[Payload]):
    """Rows of one sequence for one step; with `logit_count` 0 more of its rows follow in a later step.

    `branches`: further paths of the sequence, in depth-first order; their rows follow, all with logits.

    `tree`, if given, holds the rows' cells, in blocks held by this table only. The table's length then stays unchanged:
    its owner tracks the valid cells.
    """

    table: BlockTable
    start: int
    token_ids: Sequence[int]
    logit_count: int
    payload: Payload
    tree: TreeRows | None = None
    branches: Sequence[BranchRows] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def row_count(self) -> int:
        """Rows of all paths."""
        return len(self.token_ids) + sum(len(branch.token_ids) for branch in self.branches)

    def chunks(self, block_size: int) -> list[SequenceChunk]:
        """Returns the chunks of its paths. A branch's blocks begin with the rows of the path before it."""
        table, logit_count = self.table.block_ids, self.logit_count - self.row_count + len(self.token_ids)
        chunks = [SequenceChunk(table, self.start, self.token_ids, logit_count, self.tree)]
        for branch in self.branches:
            first = branch.blocks.first
            blocks = [*table[:first], *branch.blocks.block_ids]
            copied_count = branch.start - max(self.start, first * block_size)
            count = len(branch.token_ids)
            chunks.append(SequenceChunk(blocks, branch.start, branch.token_ids, count, copied_count=copied_count))
        return chunks


class PieceFlags(Sequence[bool]):
    """Whether all values of each piece are finite, from the flags of their chunks, read when asked for."""

    def __init__(self, is_finite: Sequence[bool], chunk_counts: Sequence[int]) -> None:
        self._is_finite = is_finite
        self._starts = [0, *accumulate(chunk_counts)]

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> bool: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bool]: ...

    def __getitem__(self, index: int | slice) -> bool | Sequence[bool]:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        return all(self._is_finite[chunk] for chunk in range(self._starts[index], self._starts[index + 1]))


@dataclass(frozen=True, slots=True)
class Computed:
    """Results of the forwards: per piece an error or None, its logits, the hidden states of the same rows if the model
    returns them, and whether all its values are finite.

    `together` is all logits if one forward ran all pieces. On a GPU, reading a flag waits for the forward.
    """

    outcomes: list[SpecdecError | None]
    logits: list[torch.Tensor | None]  # each [logit_count, vocab] float32
    hidden: list[torch.Tensor | None]  # each [logit_count, hidden]
    is_finite: Sequence[bool]
    together: torch.Tensor | None  # [sum of logit counts, vocab] float32


@dataclass(frozen=True, slots=True)
class StepReport(Generic[Answer]):
    """One outcome per piece, in order: a SpecdecError, the sampler output, or None for a piece without logits.

    `hidden_s`: the part of `sampling_s` in which the hidden states were read.
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
    def run(self, pieces: list[Piece[Payload]], should_abandon: Callable[[], bool] | None = None) -> StepReport[Answer]:
        """Runs every piece once. An error of a piece is its outcome and is never raised. Raises StepAbandoned, with no
        piece run, if `should_abandon` says so between two layers."""
        started_s, self._hidden_s = time.perf_counter(), 0.0
        try:
            computed = self._forward(pieces, should_abandon)
        except StepAbandoned:
            for piece in pieces:
                self._scrub(piece)
            raise
        forward_s = time.perf_counter() - started_s
        outcomes = self._judge(pieces, computed)
        sampling_s = time.perf_counter() - started_s - forward_s
        for piece, outcome in zip(pieces, outcomes):
            if piece.tree is None and not isinstance(outcome, SpecdecError):
                self._cache.advance(piece.table, piece.end)
                for branch in piece.branches:
                    branch.blocks.length = branch.end
        row_count = sum(piece.row_count for piece in pieces)
        return StepReport(outcomes, forward_s, sampling_s, row_count, self._hidden_s)

    def warm_up(self) -> None:
        """Runs one token through the model before the first request. Raises the model's errors."""
        table = self._cache.reserve(1)
        try:
            with torch.inference_mode():
                self._model.forward(RaggedBatch((SequenceChunk(table.block_ids, 0, (0,), 1),)))
            self._cache.scrub(table, 0, 1)
        finally:
            self._cache.release(table)

    def _forward(self, pieces: list[Piece[Payload]], should_abandon: Callable[[], bool] | None = None) -> Computed:
        """Runs all pieces in one forward, or each alone if that forward raised."""
        try:
            return self._forward_together(pieces, should_abandon)
        except StepAbandoned:
            raise
        except Exception as error:
            if len(pieces) == 1:
                logger.exception("the forward of one request failed")
                self._scrub(pieces[0])
                return Computed([_as_specdec_error(error)], [None], [None], [True], None)
            logger.warning("a step of %d requests failed (%s); repeating them one by one", len(pieces), error)
        alone = [self._forward([piece]) for piece in pieces]
        outcomes, logits, hidden, flags = (
            [getattr(one, name)[0] for one in alone] for name in ("outcomes", "logits", "hidden", "is_finite")
        )
        return Computed(outcomes, logits, hidden, flags, None)

    def _forward_together(self, pieces: list[Piece[Payload]], should_abandon: Callable[[], bool] | None) -> Computed:
        for piece in pieces:
            if piece.tree is None:
                self._cache.prepare_write(piece.table, piece.end)
            if piece.branches:
                self._cache.begin_branches(piece.table, [branch.blocks for branch in piece.branches])
        chunks = tuple(chunk for piece in pieces for chunk in piece.chunks(self._cache.block_size))
        output = self._model.forward(RaggedBatch(chunks, should_abandon))
        is_finite = output.is_finite
        if len(chunks) > len(pieces):
            is_finite = PieceFlags(is_finite, [1 + len(piece.branches) for piece in pieces])
        counts = [piece.logit_count for piece in pieces]
        logits = [its_logits if count else None for count, its_logits in zip(counts, output.logits.split(counts))]
        hidden: list[torch.Tensor | None] = [None] * len(pieces)
        if output.hidden is not None:
            hidden[:] = output.hidden.split(counts)
        return Computed([None] * len(pieces), logits, hidden, is_finite, output.logits)

    def _judge(self, pieces: list[Piece[Payload]], computed: Computed) -> list[Answer | SpecdecError | None]:
        """Returns the outcomes: for every piece with logits its sampler output, or the error of the sampler.

        The sampler runs before the logits are checked to be finite: the check waits for the device, as does the end of
        the sampler.
        """
        asked = {index: logits for index, logits in enumerate(computed.logits) if logits is not None}
        results: dict[int, Answer | SpecdecError] = {}
        try:
            if asked:
                together = torch.cat(list(asked.values())) if computed.together is None else computed.together
                hidden = [computed.hidden[index] for index in asked]
                results.update(zip(asked, self._output_of([pieces[index] for index in asked], together, hidden)))
        except Exception as error:
            logger.warning("sampling for %d requests failed (%s); repeating it one by one", len(asked), error)
            results = {
                i: self._output_alone(pieces[i], asked[i], computed.hidden[i]) for i in asked if computed.is_finite[i]
            }
        outcomes: list[Answer | SpecdecError | None] = list(computed.outcomes)
        for index, piece in enumerate(pieces):
            if outcomes[index] is not None:
                continue
            if not computed.is_finite[index]:
                outcomes[index] = self._not_finite(piece)
                continue
            outcomes[index] = results.get(index)
            if isinstance(outcomes[index], SpecdecError):
                self._scrub(piece)
        return outcomes

    def _output_of(
        self, pieces: list[Piece[Payload]], logits: torch.Tensor, hidden: Sequence[torch.Tensor | None]
    ) -> Sequence[Answer]:
        payloads = [piece.payload for piece in pieces]
        results = self._sampler(payloads, [piece.logit_count for piece in pieces], logits)
        if len(results) != len(pieces):
            raise ValueError(f"the sampler gave {len(results)} results for {len(pieces)} requests")
        if self._read_hidden is not None:
            started_s = time.perf_counter()
            try:
                results = self._read_hidden(payloads, [own for own in hidden if own is not None], results)
            except Exception:  # they decide no text
                logger.exception("no proposals of heads in a step of %d requests", len(pieces))
            self._hidden_s += time.perf_counter() - started_s
        return results

    def _output_alone(
        self, piece: Piece[Payload], logits: torch.Tensor, hidden: torch.Tensor | None
    ) -> Answer | SpecdecError:
        try:
            return self._output_of([piece], logits, [hidden])[0]
        except Exception as error:
            logger.exception("the sampling of one request failed")
            return _as_specdec_error(error)

    def _not_finite(self, piece: Piece[Payload]) -> NumericsError:
        self._scrub(piece)
        end = max((branch.end for branch in piece.branches), default=piece.end)
        positions = range(piece.start, max(end, piece.end)) if piece.tree is None else piece.tree.positions
        return NumericsError(f"not-a-number or infinity at positions {min(positions)} to {max(positions)}")

    def _scrub(self, piece: Piece[Payload]) -> None:
        """Zeroes the positions of a failed piece: not-a-number in a block would outlive its owner."""
        try:
            if piece.tree is not None:
                for cell in piece.tree.cells:
                    self._cache.scrub(piece.table, cell, cell + 1)
                return
            self._cache.prepare_write(piece.table, piece.end)
            self._cache.scrub(piece.table, piece.start, piece.end)
            for branch in piece.branches:
                self._cache.scrub_branch(branch.blocks)
        except Exception:  # it must not fail the others of its step
            logger.exception("could not make the blocks of a failed request its own")


def _as_specdec_error(error: Exception) -> SpecdecError:
    if isinstance(error, SpecdecError):
        return error
    return SpecdecError(f"{type(error).__name__}: {error}")
