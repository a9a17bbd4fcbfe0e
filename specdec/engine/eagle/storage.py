"""What an EAGLE-3 head keeps in the cells of its target's cache: of every position the reduced feature, and the keys
and values of its pair where a pass has computed them.

It has the blocks of the target's storage, so that rollback, reuse, copies and moves of cells need nothing of their own.
Which pairs are there is a property of a cell's content: it is copied with it, and lost when the cell is written anew.
Scratch slots for pairs that are not committed lie behind the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy
import torch
from torch import Tensor

from specdec.engine.interface import Storage

SCRATCH_CELLS = 4096  # of one round's pairs: 32 sessions with 8 nodes in each of 16 passes


class PairStorage(Storage, Protocol):
    """Storage of keys and values of pairs, in the layout that a pass reads."""


class PlainPairs:
    """Keys and values of pairs for plain torch: [slots, kv heads, head size] each."""

    def __init__(
        self,
        block_count: int,
        block_size: int,
        kv_head_count: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        shape = block_count * block_size, kv_head_count, head_size
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))

    @torch.inference_mode()
    def copy_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        for own in (self.keys, self.values):
            own[list(destinations)] = own[list(sources)]

    @torch.inference_mode()
    def scrub(self, block_id: int, start: int, end: int) -> None:
        first = block_id * self.block_size
        for own in (self.keys, self.values):
            own[first + start : first + end] = 0


class EagleStorage:
    """Storage of a target with a head: the target's own, and the head's beside it."""

    def __init__(self, target: Storage, pairs: PairStorage, features: Tensor, block_count: int) -> None:
        """features: [blocks, block size, hidden]"""
        self.target, self.pairs = target, pairs
        self.block_size: int = features.shape[1]
        self.features = features.flatten(0, 1)  # [slots, hidden]
        self.has_pair = numpy.zeros(block_count * self.block_size, numpy.bool_)  # [slots]
        self.scratch_start = block_count * self.block_size

    @torch.inference_mode()
    def copy_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self.target.copy_slots(sources, destinations)
        self.pairs.copy_slots(sources, destinations)
        places, to_places = list(sources), list(destinations)
        self.features[to_places] = self.features[places]
        self.has_pair[to_places] = self.has_pair[places]

    @torch.inference_mode()
    def scrub(self, block_id: int, start: int, end: int) -> None:
        self.target.scrub(block_id, start, end)
        self.pairs.scrub(block_id, start, end)
        own = slice(block_id * self.block_size + start, block_id * self.block_size + end)
        self.features[own] = 0
        self.has_pair[own] = False

    @torch.inference_mode()
    def write(self, slots: numpy.ndarray, features: Tensor) -> None:
        """Writes the features of positions, whose pairs are then not there: slots [rows], features [rows, hidden]."""
        self.features.index_copy_(0, torch.from_numpy(slots).to(features.device), features)
        self.has_pair[slots] = False

    @torch.inference_mode()
    def read(self, slots: numpy.ndarray) -> Tensor:
        """Returns the features of positions.  # [rows, hidden]"""
        return self.features.index_select(0, torch.from_numpy(slots).to(self.features.device))

    def scrub_slots(self, slots: Sequence[int]) -> None:
        """Zeroes the pairs in these slots, scratch ones too, which then are not there."""
        for slot in slots:
            block, offset = divmod(slot, self.block_size)
            self.pairs.scrub(block, offset, offset + 1)
            if slot < self.scratch_start:
                self.has_pair[slot] = False
