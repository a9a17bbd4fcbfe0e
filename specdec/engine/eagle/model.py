"""A target with an EAGLE-3 head: a CausalModel whose cells also hold what the head needs, and the head's passes.

It delegates to the target, whose results it leaves as they are, and writes the reduced features of every row. A pass
computes pairs of several sequences; what it proposes for is its caller's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from specdec.engine.cpu.kernels import kernels
from specdec.engine.cpu.llama_parts import PackedEmbedding
from specdec.engine.eagle.modules import ModulePass
from specdec.engine.eagle.native import KernelPass
from specdec.engine.eagle.network import EagleHead
from specdec.engine.eagle.pairs import Chain, DraftedChain, PairChunk, PassResult, slots_of
from specdec.engine.eagle.storage import SCRATCH_CELLS, EagleStorage, PairStorage
from specdec.engine.interface import CausalModel, Chunk, Features, RaggedBatch, StepOutput


class HeadPass(Protocol):
    """The passes of a head on a device."""

    def allocate(self, block_count: int, block_size: int) -> PairStorage:
        """Returns storage for the pairs of later passes, zeroed."""

    def reduce(self, features: Tensor) -> Tensor:
        """[rows, layers * target hidden] -> f [rows, hidden], of the target's type"""

    def run(self, chunks: Sequence[PairChunk], embeddings: Tensor, asked: Sequence[int]) -> PassResult:
        """Runs a pass. embeddings: [pairs, hidden] of the target's type; `asked`: pairs whose logits are wanted."""


class FeatureTarget(CausalModel, Features, Protocol):
    """A target that a head may read."""


class EagleTarget:
    """A target and its head. One thread at a time."""

    def __init__(self, target: FeatureTarget, head: EagleHead, is_packed: bool = True) -> None:
        """`is_packed`: on native kernels the head's weights are rounded to 8 bits. Raises ModelRefused for a target
        without features."""
        self.description = target.description
        self.target, self.config = target, head.config
        target.return_features(head.config.aux_layer_ids)
        self._dtype: torch.dtype = getattr(torch, self.description.dtype)
        self._device = torch.device(self.description.device.split()[0])
        self._table = self._embedding(head)
        self.target_ids = head.target_ids.to(self._device)  # [draft vocabulary] int64
        self._pass = self._make_pass(head, is_packed)
        self._storage: EagleStorage | None = None

    def _make_pass(self, head: EagleHead, is_packed: bool) -> HeadPass:
        native = kernels() if self._device.type == "cpu" else None
        if native is None:
            return ModulePass(head, self._dtype, self._device)
        table = self._table if isinstance(self._table, Tensor) else self._table.packed
        return KernelPass(native, head, table, self._dtype, self.description.positions_max, is_packed)

    def _embedding(self, head: EagleHead) -> Tensor | PackedEmbedding:
        """Returns the table of second inputs: the head's own, or the target's."""
        own: Any = self.target.load_embedding() if head.embed_tokens is None else head.embed_tokens.weight.detach()
        return own if isinstance(own, PackedEmbedding) else own.to(device=self._device, dtype=self._dtype)

    def _embed(self, token_ids: Sequence[int]) -> Tensor:
        """[pairs] -> [pairs, hidden]"""
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        return self._table.index_select(0, ids) if isinstance(self._table, Tensor) else self._table.rows(ids)

    @property
    def cache_bytes_per_position(self) -> int:
        config = self.config
        numbers = config.hidden_size + 2 * config.kv_head_count * config.head_size
        return self.target.cache_bytes_per_position + numbers * self._dtype.itemsize

    @property
    def storage(self) -> EagleStorage:
        """That of the last `allocate`."""
        if self._storage is None:
            raise RuntimeError("the storage was asked for before allocate")
        return self._storage

    def allocate(self, block_count: int, block_size: int) -> EagleStorage:
        scratch_count = -(-SCRATCH_CELLS // block_size)
        pairs = self._pass.allocate(block_count + scratch_count, block_size)
        shape = block_count, block_size, self.config.hidden_size
        features = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._storage = EagleStorage(self.target.allocate(block_count, block_size), pairs, features, block_count)
        return self._storage

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> StepOutput:
        """See `CausalModel`; the target's own results."""
        output = self.target.forward(batch)
        assert output.features is not None, "the target was asked for features"
        storage = self.storage
        slots = [slots_of(chunk.block_ids, cells_of(chunk), storage.block_size) for chunk in batch.chunks]
        storage.write(numpy.concatenate(slots), self._pass.reduce(output.features))
        return output

    @torch.inference_mode()
    def run_pass(self, chunks: Sequence[PairChunk], asked: Sequence[int]) -> PassResult:
        """Computes pairs and writes their keys and values; those in cells are there from now on. `asked`: pairs, all
        chunks together, whose logits are wanted. Pairs that are not finite are not kept."""
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        result = self._pass.run(chunks, self._embed(token_ids), asked)
        self._keep(chunks, (), result.is_finite)
        return result

    @property
    def has_chains(self) -> bool:
        """Whether there is `draft_chain`: on native kernels."""
        return isinstance(self._pass, KernelPass)

    @torch.inference_mode()
    def draft_chain(self, chunk: PairChunk, chain: Chain) -> DraftedChain:
        """Computes pairs as `run_pass` does, and drafts a chain behind the last of them, which has a path."""
        assert isinstance(self._pass, KernelPass), "a chain was asked of a model without"
        found, is_finite = self._pass.draft(chunk, self._embed(chunk.token_ids), chain)
        self._keep([chunk], chain.slots, is_finite)
        return found

    def _keep(self, chunks: Sequence[PairChunk], behind: Sequence[int], is_finite: Tensor) -> None:
        """Notes which pairs are there; `behind`: further scratch slots. is_finite: [pairs, those behind last]"""
        storage = self.storage
        slots: list[int] = []
        for chunk in chunks:
            in_place = slots_of(chunk.block_ids, chunk.positions, storage.block_size)
            storage.has_pair[in_place] = True
            slots += [*in_place.tolist(), *(path[-1] for path in chunk.paths)]
        if not bool(is_finite.all()):
            found = zip([*slots, *behind], is_finite.tolist())
            storage.scrub_slots([slot for slot, is_number in found if not is_number])


def cells_of(chunk: Chunk) -> numpy.ndarray:
    """Returns the cells that the rows of a chunk are written to.  # [rows] int64"""
    return numpy.array([*range(chunk.start, chunk.base), *(path[-1] for path in chunk.paths)], numpy.int64)
