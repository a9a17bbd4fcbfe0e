"""Pairs of a pass of an EAGLE-3 head: their places, and what the pass gives.

The pair of position t >= 1 is (f_(t-1), token t). Its keys and values belong to the cell of position t, so that a cell
depends on the tokens up to its own alone, as everything in a block that sequences share; its rotary position is t - 1.
Pairs behind the committed tokens lie in scratch slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy
from torch import Tensor

from specdec.engine.cpu.plan import RowArrays

FIRST = 1  # the first position with a pair


@dataclass(frozen=True, slots=True)
class PairChunk:
    """Pairs of one sequence in a pass: first those at `positions`, ascending and below `base`, each in the cell of its
    position; then one for each of `paths`, in the last slot of its path. A pair sees those before its own position, a
    pair with a path those of the positions FIRST to base - 1 and then its path's slots, whose positions follow.

    features: [pairs, hidden], f_(t-1) of each. A slot is block * block size + offset, scratch ones behind all blocks.
    """

    block_ids: Sequence[int]
    positions: numpy.ndarray  # [pairs without a path] int64
    base: int
    token_ids: Sequence[int]
    features: Tensor
    paths: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class PassResult:
    """Result of a pass, pairs chunk by chunk. `is_finite` [pairs] bool."""

    x: Tensor  # [pairs, hidden], the next pairs' features
    logits: Tensor  # [pairs asked for, draft vocabulary] float32
    is_finite: Tensor


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain to draft behind the last pair of a pass: one token more than `slots`, those of the pairs of its tokens.
    `keys`: of the noise of each token (`protocol.noise.stream_key`); none: the likeliest token at any temperature."""

    slots: Sequence[int]
    keys: Sequence[int] | None
    temperature: float


class DraftedChain(NamedTuple):
    """Tokens with their confidences, and whether the pass of each was finite: those behind one that was not mean
    nothing."""

    guesses: list[tuple[int, float]]
    is_finite: list[bool]


def slots_of(block_ids: Sequence[int], cells: numpy.ndarray, block_size: int) -> numpy.ndarray:
    """Returns the slots of a sequence's cells.  # int64"""
    slots: numpy.ndarray = numpy.asarray(block_ids, numpy.int64)[cells // block_size] * block_size + cells % block_size
    return slots


def plan_pairs(chunks: Sequence[PairChunk], block_size: int) -> RowArrays:
    """Returns the rows of a pass. Pure. Of lists: passes are of few rows, for which each call of numpy costs more."""
    counts, paths = [len(chunk.token_ids) for chunk in chunks], [path for chunk in chunks for path in chunk.paths]
    position: list[int] = []
    base: list[int] = []
    slot: list[int] = []
    lengths: list[int] = []
    for chunk in chunks:
        places = chunk.positions.tolist()
        position += [place - 1 for place in places] + [chunk.base + len(path) - 2 for path in chunk.paths]
        base += [place + 1 for place in places] + [chunk.base] * len(chunk.paths)
        if places:
            slot += slots_of(chunk.block_ids, chunk.positions, block_size).tolist()
        slot += [path[-1] for path in chunk.paths]
        lengths += [0] * len(places) + [len(path) for path in chunk.paths]
    tables = [chunk.block_ids[: -(-chunk.base // block_size)] for chunk in chunks]
    return RowArrays(
        sequence=numpy.arange(len(chunks), dtype=numpy.int32).repeat(counts),
        position=numpy.array(position, numpy.int32),
        slot=numpy.array(slot, numpy.int32),
        base=numpy.array(base, numpy.int32),
        path_start=numpy.array([0, *accumulate(lengths)], numpy.int64),
        path=numpy.array([*chain.from_iterable(paths)], numpy.int32),
        table_start=numpy.array([0, *accumulate(map(len, tables))], numpy.int64),
        table=numpy.array([*chain.from_iterable(tables)], numpy.int32),
        first=numpy.full(sum(counts), FIRST, numpy.int32),
    )
