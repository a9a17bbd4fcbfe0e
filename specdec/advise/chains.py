"""A feature head along texts that its target reads: what it drafts behind every token, as `specdec target` computes it.

Behind a token at position t the head drafts a chain: its first token from the pair of t, which reads the target's
feature, each later one from a pair that reads the head's own x beside the token before it, which is the text's, as the
chain went on only if that was accepted. So all chains of a text need one pass for each place in a chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy
import torch
from torch import Tensor

from specdec.advise.agreement import ROWS, fitted
from specdec.advise.forecast import LENGTHS
from specdec.decoding.proposal import KnownTokens
from specdec.engine.eagle.model import EagleTarget
from specdec.engine.eagle.pairs import FIRST, PairChunk, PassResult, slots_of
from specdec.errors import NumericsError

CHAIN = LENGTHS[-1]  # tokens of a chain
PAIRS_MAX = 512  # of a pass


class ChainReader:
    """A `TextReader`: a head behind the reader of its target, which has read as far in the same text in `blocks`."""

    def __init__(self, model: EagleTarget, blocks: Sequence[int]) -> None:
        self.hidden: Tensor | None = None
        self.deeper: Sequence[Tensor] = ()
        self._model, self._blocks, self._known = model, blocks, KnownTokens(model.target_ids)

    def read(self, token_ids: Sequence[int], first: int, encoder_length: int = 0) -> Iterator[Tensor]:
        """Yields logits of positions first, first + 1, ..., ROWS at a time, and keeps those of chains behind them that
        begin at `first` or later.  # [rows, vocabulary] float32

        `first`: at least FIRST. Raises NumericsError for results that are no numbers.
        """
        for start in range(FIRST, first, PAIRS_MAX):
            self._run([self._in_place(token_ids, start, min(start + PAIRS_MAX, first))], ())
        x = self._model.storage.features[:0]
        for start in range(first, len(token_ids), ROWS):
            end = min(start + ROWS, len(token_ids))
            result = self._run([self._in_place(token_ids, start, end)], range(end - start))
            x = torch.cat([x[1 - CHAIN :], result.x])  # of chains that reach these rows: some begin before them
            self.deeper = [*self._behind(token_ids, x, start, end)]
            yield self._logits(result)

    def _behind(self, token_ids: Sequence[int], x: Tensor, start: int, end: int) -> Iterator[Tensor]:
        """Yields the logits of the second, the third, ... token of the chains, for those of the rows from `start` to
        `end` that chains reach. x: [chains, hidden], of the first pairs of the chains, the last of which is at the last
        row."""
        root = end - len(x)  # of the first chain
        for place in range(1, min(CHAIN, len(x))):
            roots = range(root, end - place)
            chunks = [self._later(token_ids, own, place, x[own - root]) for own in roots]
            result = self._run(chunks, range(max(0, start - place - root), len(roots)))
            x = result.x
            yield self._logits(result)

    def _in_place(self, token_ids: Sequence[int], start: int, end: int) -> PairChunk:
        """Returns the pairs of the positions from `start` to `end`."""
        storage, positions = self._model.storage, numpy.arange(start, end)
        features = storage.read(slots_of(self._blocks, positions - 1, storage.block_size))
        return PairChunk(self._blocks, positions, end, token_ids[start:end], features)

    def _later(self, token_ids: Sequence[int], root: int, place: int, x: Tensor) -> PairChunk:
        """Returns the pair `place` behind the first of the chain that begins at `root`. x: [hidden], of the pair before
        it."""
        begin = self._model.storage.scratch_start + root % (ROWS + CHAIN) * CHAIN
        path = range(begin, begin + place)
        none = numpy.zeros(0, numpy.int64)
        return PairChunk(self._blocks, none, root + 1, [token_ids[root + place]], x[None], [path])

    def _run(self, chunks: Sequence[PairChunk], asked: Sequence[int]) -> PassResult:
        result = self._model.run_pass(chunks, asked)
        if not bool(result.is_finite.all()):
            raise NumericsError(f"results of the head of {self._model.description.model_name} are no numbers")
        return result

    def _logits(self, result: PassResult) -> Tensor:
        return fitted(self._known.spread(result.logits).float().cpu(), self._model.description.vocabulary_size)
