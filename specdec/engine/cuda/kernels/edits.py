"""Edits of logits on a device: masks, biases and penalties of any mix of requests in one launch.

The definition is that of `specdec.decoding.logits_processors`, bit for bit: float64, each edit in its order, and none
that would leave a row without a token. One program edits one row, step by step; its threads wait for each other between
steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specdec.engine.cuda.kernels.launch import cdiv, constexpr, is_there, jit, tl
from specdec.engine.cuda.kernels.sampling import run

TILE = 2048
BLOCK = 256  # entries of a list that are read at once
FIELDS = 14  # whole numbers of a row: see `Edits`
PENALTIES = 3  # float64 of a row
if is_there():
    F, P = constexpr(FIELDS), constexpr(PENALTIES)


class Edits(NamedTuple):
    """What the kernel reads of n rows, on the logits' device.

    fields [n, FIELDS] int64: row of `words`, or -1; then the first of `entries` and their number, of allowed ids, of
    two lists of ids that are left out one after the other, of biased ids, of penalised ids, which are followed by as
    many counts in the output and as many in all, and of tokens that are counted too; last the first of `numbers`, the
    biases.
    penalties [n, PENALTIES] float64: repetition, presence, frequency. words [rows, count] int32: masks of legal tokens.
    No list has an id twice.
    """

    fields: torch.Tensor
    penalties: torch.Tensor
    entries: torch.Tensor
    numbers: torch.Tensor
    words: torch.Tensor


@jit()
def masked_at(logits, stride, width, words, word_count, mask, index, columns, used):
    """The logits of a row in these columns, -inf for illegal tokens.  # float64"""
    used = used & (columns < width)
    own = tl.load(logits + index.to(tl.int64) * stride + columns, mask=used, other=-float("inf")).to(tl.float64)
    if mask >= 0:
        word = tl.load(words + mask * word_count + columns // 32, mask=used, other=0)
        own = tl.where((word >> (columns % 32).to(tl.int32)) & 1 == 1, own, -float("inf"))
    return own


@jit()
def copied(logits, stride, width, words, word_count, mask, index, own, tiles, TILE: constexpr):
    """Writes a row with its mask; returns the number of its tokens above -inf."""
    count = 0
    for tile in range(0, tiles):
        columns = tile * TILE + tl.arange(0, TILE)
        values = masked_at(logits, stride, width, words, word_count, mask, index, columns, columns >= 0)
        tl.store(own + columns, values, mask=columns < width)
        count += tl.sum((values > -float("inf")).to(tl.int32), 0)
    return count


@jit()
def counted_in(own, entries, first, count, BLOCK: constexpr):
    """How many tokens of a list are above -inf."""
    found = 0
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        ids = tl.load(entries + first + places, mask=places < count, other=0)
        values = tl.load(own + ids, mask=places < count, other=-float("inf"))
        found += tl.sum((values > -float("inf")).to(tl.int32), 0)
    return found


@jit()
def left_out(own, entries, first, count, finite, BLOCK: constexpr):
    """Leaves the tokens of a list out, unless no other is there; returns the number of those above -inf after it."""
    inside = counted_in(own, entries, first, count, BLOCK)
    tl.debug_barrier()
    if (inside > 0) & (inside < finite):
        finite -= inside
        for start in range(0, count, BLOCK):
            places = start + tl.arange(0, BLOCK)
            ids = tl.load(entries + first + places, mask=places < count, other=0)
            tl.store(own + ids, tl.full([BLOCK], -float("inf"), tl.float64), mask=places < count)
        tl.debug_barrier()
    return finite


@jit()
def kept(
    logits, stride, width, words, word_count, mask, index, own, entries, first, count, finite, tiles, TILE: constexpr,
    BLOCK: constexpr,
):  # fmt: skip
    """Leaves all tokens but those of a list out, unless none of these is there; returns the number above -inf."""
    inside = counted_in(own, entries, first, count, BLOCK)
    tl.debug_barrier()
    if inside > 0:
        finite = inside
        for tile in range(0, tiles):
            columns = tile * TILE + tl.arange(0, TILE)
            tl.store(own + columns, tl.full([TILE], -float("inf"), tl.float64), mask=columns < width)
        tl.debug_barrier()
        for start in range(0, count, BLOCK):
            places = start + tl.arange(0, BLOCK)
            ids = tl.load(entries + first + places, mask=places < count, other=0)
            values = masked_at(logits, stride, width, words, word_count, mask, index, ids, places < count)
            tl.store(own + ids, values, mask=places < count)
        tl.debug_barrier()
    return finite


@jit()
def penalised(own, entries, first, count, later, later_count, penalties, index, BLOCK: constexpr):
    """Applies the penalties to the tokens of a list."""
    repetition, presence = tl.load(penalties + index * P), tl.load(penalties + index * P + 1)
    frequency = tl.load(penalties + index * P + 2)
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        used = places < count
        ids = tl.load(entries + first + places, mask=used, other=0)
        output = tl.load(entries + first + count + places, mask=used, other=0)
        every = tl.load(entries + first + 2 * count + places, mask=used, other=0)
        for place in range(0, later_count):
            again = (tl.load(entries + later + place) == ids).to(tl.int64)
            output += again
            every += again
        values = tl.load(own + ids, mask=used, other=0.0)
        factors = tl.where(every > 0, repetition, 1.0)
        less, more = values / factors, values * factors
        values = tl.where(repetition > 1, tl.minimum(less, more), tl.maximum(less, more))
        values = values - presence * (output > 0).to(tl.float64)
        values = values - frequency * output.to(tl.float64)
        tl.store(own + ids, values, mask=used)


@jit("word_count")
def edit_kernel(
    logits, stride, width, fields, penalties, entries, numbers, words, word_count, edited, tiles, TILE: constexpr,
    BLOCK: constexpr,
):  # fmt: skip
    """grid: (rows,)"""
    index = tl.program_id(0)
    its = fields + index * F
    mask = tl.load(its)
    own = edited + index.to(tl.int64) * width
    finite = copied(logits, stride, width, words, word_count, mask, index, own, tiles, TILE)
    if (mask >= 0) & (finite == 0):
        mask = mask * 0 - 1
        finite = copied(logits, stride, width, words, word_count, mask, index, own, tiles, TILE)
    tl.debug_barrier()
    first, count = tl.load(its + 1), tl.load(its + 2).to(tl.int32)
    if count > 0:
        finite = kept(
            logits, stride, width, words, word_count, mask, index, own, entries, first, count, finite, tiles, TILE,
            BLOCK,
        )  # fmt: skip
    for place in range(3, 7, 2):
        finite = left_out(own, entries, tl.load(its + place), tl.load(its + place + 1).to(tl.int32), finite, BLOCK)
    first, count, bias = tl.load(its + 7), tl.load(its + 8).to(tl.int32), tl.load(its + 13)
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        ids = tl.load(entries + first + places, mask=places < count, other=0)
        values = tl.load(own + ids, mask=places < count, other=0.0)
        values += tl.load(numbers + bias + places, mask=places < count, other=0.0)
        tl.store(own + ids, values, mask=places < count)
    tl.debug_barrier()
    first, count = tl.load(its + 9), tl.load(its + 10).to(tl.int32)
    penalised(own, entries, first, count, tl.load(its + 11), tl.load(its + 12).to(tl.int32), penalties, index, BLOCK)


def edit(logits: torch.Tensor, edits: Edits) -> torch.Tensor:
    """Returns the logits after all edits.  # [rows, width] float32 -> [rows, width] float64"""
    rows, width = logits.shape
    edited = torch.empty(rows, width, dtype=torch.float64, device=logits.device)
    its = edits.fields, edits.penalties, edits.entries, edits.numbers, edits.words, edits.words.shape[1]
    own = logits, logits.stride(0), width
    run(edit_kernel, (rows,), *own, *its, edited, cdiv(width, TILE), TILE=TILE, BLOCK=BLOCK)
    return edited
