"""A pass of an EAGLE-3 head by the modules of its network, on any device: on GPUs, and where there are no kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specdec.engine.eagle.network import EagleHead
from specdec.engine.eagle.pairs import FIRST, PairChunk, PassResult, slots_of
from specdec.engine.eagle.storage import PlainPairs


class ModulePass:
    """Passes of a head by torch, in a target's type; a sequence attends by itself. One thread at a time."""

    def __init__(self, head: EagleHead, dtype: torch.dtype, device: torch.device) -> None:
        self._head = head.to(device=device, dtype=dtype)
        self._dtype, self._device = dtype, device
        self._pairs: PlainPairs | None = None

    def allocate(self, block_count: int, block_size: int) -> PlainPairs:
        """Returns storage for the pairs of later passes, zeroed."""
        config = self._head.config
        shape = block_count, block_size, config.kv_head_count, config.head_size
        self._pairs = PlainPairs(*shape, self._dtype, self._device)
        return self._pairs

    def reduce(self, features: Tensor) -> Tensor:
        """[rows, layers * target hidden] -> f [rows, hidden], of the target's type"""
        result: Tensor = self._head.fc(features)
        return result

    @torch.inference_mode()
    def run(self, chunks: Sequence[PairChunk], embeddings: Tensor, asked: Sequence[int]) -> PassResult:
        """Runs a pass. embeddings: [pairs, hidden] of the target's type; `asked`: pairs whose logits are wanted."""
        counts = [len(chunk.token_ids) for chunk in chunks]
        x = torch.cat([self._one(*own)[0] for own in zip(chunks, embeddings.split(counts))])
        logits = self._head.logits(x[torch.tensor(asked, dtype=torch.int64, device=x.device)]).float()
        return PassResult(x, logits, torch.isfinite(x.sum(-1, dtype=torch.float32)))

    def _one(self, chunk: PairChunk, embeddings: Tensor) -> Tensor:
        """Returns x of a sequence's pairs.  # [1, pairs, hidden]"""
        pairs = self._pairs
        assert pairs is not None, "run was called before allocate"
        in_place = chunk.positions
        own_positions = [*in_place.tolist(), *(chunk.base + len(path) - 1 for path in chunk.paths)]
        positions = torch.tensor(own_positions, device=self._device) - 1
        own = self._head.project(chunk.features[None], embeddings[None], positions)
        below = numpy.arange(FIRST, chunk.base)
        behind = {slot: len(below) + place for place, slot in enumerate(dict.fromkeys(sum(map(list, chunk.paths), [])))}
        seen = torch.from_numpy(slots_of(chunk.block_ids, below, pairs.block_size)).tolist() + [*behind]
        written = [*slots_of(chunk.block_ids, in_place, pairs.block_size).tolist(), *(p[-1] for p in chunk.paths)]
        for stored, new in ((pairs.keys, own.keys), (pairs.values, own.values)):
            stored[written] = new[0].transpose(0, 1)
        mask = torch.zeros(len(own_positions), len(seen), dtype=torch.bool)  # [pairs, seen]
        mask[: len(in_place), : len(below)] = torch.from_numpy(below <= in_place[:, None])
        for row, path in enumerate(chunk.paths, len(in_place)):
            mask[row, : len(below)] = True
            mask[row, [behind[slot] for slot in path]] = True
        keys, values = (stored[seen].transpose(0, 1)[None] for stored in (pairs.keys, pairs.values))
        mask = mask.to(self._device)
        attended = scaled_dot_product_attention(own.queries, keys, values, attn_mask=mask, enable_gqa=True)
        return self._head.finish(own.residual, attended)
