"""Sampling on a device: tokens and target probabilities of any mix of rules and parameters in a few launches.

The definition is that of `specdec.decoding`, whose decisions these kernels make: float64 from the logits on, ties to
the lowest id, noise by SplitMix64. Supports are limits, not lists: the k likeliest tokens are those above a value, and
those of this value up to an id; so are the tokens of a nucleus, by their scores. A row is cut into tiles of TILE
columns; sums are those of tiles, added in their order, so the bits of a row do not depend on others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from specdec.engine.cuda.kernels.launch import cdiv, constexpr, is_there, jit, power_of_two, tl

TILE = 2048
RANKED = 1024  # ranked numbers that are read at once
TOUCHED_MIN = 128  # entries of a row, rounded up to a power of two: as many binaries
WARPS = 8
FIELDS = 11  # whole numbers of a row: see `Tables`
NUMBERS = 4  # float64 of a row
if is_there():
    GREEDY, REJECTION, COUPLED = constexpr(0), constexpr(1), constexpr(2)
    F, N = constexpr(FIELDS), constexpr(NUMBERS)
    INCREMENT, MULTIPLIER_1 = constexpr(0x9E3779B97F4A7C15), constexpr(0xBF58476D1CE4E5B9)
    MULTIPLIER_2 = constexpr(0x94D049BB133111EB)


def run(
    kernel: Any, grid: tuple[int, ...], *arguments: torch.Tensor | int, warps: int = WARPS, **constants: int
) -> None:
    """Launches a kernel; multiplications and additions stay apart, as torch computes them."""
    kernel[grid](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)


@jit()
def values_at(values, stride, width, fields, index, columns):
    """The numbers of a row in these columns, -inf beyond its end.  # float64"""
    row = tl.load(fields + index * F)
    return tl.load(values + row * stride + columns, mask=columns < width, other=-float("inf")).to(tl.float64)


@jit()
def largest_of(maxima, index, tiles, TILES: constexpr):
    """The largest number of a row."""
    places = tl.arange(0, TILES)
    return tl.max(tl.load(maxima + index * tiles + places, mask=places < tiles, other=-float("inf")), 0)


@jit()
def scores_of(values, largest, numbers, index):
    """Log-probabilities up to a constant; -inf for tokens that min_p drops."""
    temperature, least = tl.load(numbers + index * N), tl.load(numbers + index * N + 1)
    scores = (values - largest) / temperature
    return tl.where(scores < least, -float("inf"), scores)


@jit()
def within(values, scores, columns, fields, index, limits, limit_ids):
    """Whether tokens are in the support."""
    inside = scores > -float("inf")
    if tl.load(fields + index * F + 3) >= 0:
        value, value_id = tl.load(limits + 2 * index), tl.load(limit_ids + 2 * index)
        score, score_id = tl.load(limits + 2 * index + 1), tl.load(limit_ids + 2 * index + 1)
        inside = inside & ((values > value) | ((values == value) & (columns <= value_id)))
        inside = inside & ((scores > score) | ((scores == score) & (columns <= score_id)))
    return inside


@jit()
def gumbel_of(key, columns):
    """The noise of tokens: `decoding.noise.gumbel`."""
    state = (columns.to(tl.uint64) + 1) * INCREMENT + key.to(tl.uint64)
    state = (state ^ (state >> 30)) * MULTIPLIER_1
    state = (state ^ (state >> 27)) * MULTIPLIER_2
    bits = (state ^ (state >> 31)) >> 12
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * 2.220446049250313e-16))


@jit()
def maxima_kernel(values, stride, width, fields, maxima, tiles, TILE: constexpr):
    """Largest number of each tile.  grid: (rows, tiles)"""
    index, tile = tl.program_id(0), tl.program_id(1)
    own = values_at(values, stride, width, fields, index, tile * TILE + tl.arange(0, TILE))
    tl.store(maxima + index * tiles + tile, tl.max(own, 0))


@jit()
def totals_kernel(
    values, stride, width, fields, numbers, selected, maxima, sums, tiles, TILE: constexpr, TILES: constexpr
):
    """Weights of each tile of rows with top_p, over all that min_p leaves.  grid: (selected rows, tiles)"""
    index, tile = tl.load(selected + tl.program_id(0)), tl.program_id(1)
    if tl.load(fields + index * F + 4) == 0:
        own = values_at(values, stride, width, fields, index, tile * TILE + tl.arange(0, TILE))
        scores = scores_of(own, largest_of(maxima, index, tiles, TILES), numbers, index)
        tl.store(sums + index * tiles + tile, tl.sum(tl.exp(scores), 0))


@jit()
def count_above(ranked, used, bound, largest, numbers, index, IS_SCORE: constexpr, BLOCK: constexpr):
    """How many of the first `used` ranked numbers, or of their scores, are above a bound."""
    count = 0
    for start in range(0, used, BLOCK):
        places = start + tl.arange(0, BLOCK)
        own = tl.load(ranked + places, mask=places < used, other=-float("inf")).to(tl.float64)
        if IS_SCORE:
            own = scores_of(own, largest, numbers, index)
        count += tl.sum((own > bound).to(tl.int32), 0)
    return count


@jit()
def tied_id(
    values, stride, width, fields, numbers, index, largest, value, value_id, bound, kept, tiles,
    IS_SCORE: constexpr, TILE: constexpr,
):  # fmt: skip
    """The id of the token number `kept`, from 1, of those with a number, or with a score within the k likeliest."""
    found = width
    seen = 0
    for tile in range(0, tiles):
        columns = tile * TILE + tl.arange(0, TILE)
        own = values_at(values, stride, width, fields, index, columns)
        ties = (own == bound) & (columns < width)
        if IS_SCORE:
            ties = scores_of(own, largest, numbers, index) == bound
            ties = ties & ((own > value) | ((own == value) & (columns <= value_id)))
        ranks = seen + tl.cumsum(ties.to(tl.int32), 0)
        found = tl.minimum(found, tl.min(tl.where(ties & (ranks == kept), columns, width), 0))
        seen += tl.sum(ties.to(tl.int32), 0)
    return found


@jit()
def nucleus_end(ranked, used, limit, largest, numbers, index, BLOCK: constexpr):
    """How many of the first `used` ranked tokens a nucleus keeps, and whether they reach the limit."""
    end = used
    hits = 0
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, used, BLOCK):
        places = start + tl.arange(0, BLOCK)
        own = tl.load(ranked + places, mask=places < used, other=-float("inf")).to(tl.float64)
        weights = tl.exp(scores_of(own, largest, numbers, index))
        reached = (total + tl.cumsum(weights, 0) >= limit) & (places < used)
        end = tl.minimum(end, tl.min(tl.where(reached, places + 1, used), 0))
        hits += tl.sum(reached.to(tl.int32), 0)
        total += tl.sum(weights, 0)
    return end, hits > 0


@jit()
def ranked_total(ranked, used, largest, numbers, index, BLOCK: constexpr):
    """The weights of the first `used` ranked tokens together."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, used, BLOCK):
        places = start + tl.arange(0, BLOCK)
        own = tl.load(ranked + places, mask=places < used, other=-float("inf")).to(tl.float64)
        total += tl.sum(tl.exp(scores_of(own, largest, numbers, index)), 0)
    return total


@jit("columns")
def limits_kernel(
    values, stride, width, fields, numbers, selected, ranked, columns, maxima, sums, limits, limit_ids, missed, tiles,
    TILE: constexpr, TILES: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """The limits of a row's support: the value of its top_k-th token, the score of the last token of its nucleus, each
    with the last id of its ties. `ranked` [selected rows, columns]: the largest numbers. `missed`: 1 for a nucleus that
    is larger than these.  grid: (selected rows,)"""
    place = tl.program_id(0)
    index = tl.load(selected + place)
    top_k, used = tl.load(fields + index * F + 4), tl.load(fields + index * F + 5).to(tl.int32)
    own = ranked + place.to(tl.int64) * columns
    largest = largest_of(maxima, index, tiles, TILES)
    value, score = tl.full([], -float("inf"), tl.float64), tl.full([], -float("inf"), tl.float64)
    value_id, score_id, is_reached = width, width, True
    if top_k > 0:
        value = tl.load(own + used - 1).to(tl.float64)
        if (used < width) & (value > -float("inf")):
            if tl.load(own + used).to(tl.float64) == value:
                kept = used - count_above(own, used, value, largest, numbers, index, False, BLOCK)
                value_id = tied_id(
                    values, stride, width, fields, numbers, index, largest, value, value_id, value, kept, tiles, False,
                    TILE,
                )  # fmt: skip
        total = ranked_total(own, used, largest, numbers, index, BLOCK)
    else:
        places = tl.arange(0, TILES)
        total = tl.sum(tl.load(sums + index * tiles + places, mask=places < tiles, other=0.0), 0)
    top_p = tl.load(numbers + index * N + 2)
    if top_p < 1:
        end, is_reached = nucleus_end(own, used, top_p * total, largest, numbers, index, BLOCK)
        score = scores_of(tl.load(own + end - 1).to(tl.float64), largest, numbers, index)
        if end < tl.minimum(used + 1, columns):
            if scores_of(tl.load(own + end).to(tl.float64), largest, numbers, index) == score:
                kept = end - count_above(own, used, score, largest, numbers, index, True, BLOCK)
                score_id = tied_id(
                    values, stride, width, fields, numbers, index, largest, value, value_id, score, kept, tiles, True,
                    TILE,
                )  # fmt: skip
    tl.store(limits + 2 * index, value)
    tl.store(limits + 2 * index + 1, score)
    tl.store(limit_ids + 2 * index, value_id.to(tl.int64))
    tl.store(limit_ids + 2 * index + 1, score_id.to(tl.int64))
    tl.store(missed + place, tl.where(is_reached | (used == width) | (top_k > 0), 0.0, 1.0))


@jit()
def race_kernel(
    values, stride, width, fields, numbers, entries, maxima, limits, limit_ids, sums, ids, tiles,
    TILE: constexpr, TILES: constexpr,
):  # fmt: skip
    """Of each tile the largest number, under COUPLED with noise, and its lowest id; under REJECTION the sum of weights
    without those of tokens with draft probabilities.  grid: (rows, tiles)"""
    index, tile = tl.program_id(0), tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    rule = tl.load(fields + index * F + 1)
    own = values_at(values, stride, width, fields, index, columns)
    best = own
    if rule != GREEDY:
        scores = scores_of(own, largest_of(maxima, index, tiles, TILES), numbers, index)
        inside = within(own, scores, columns, fields, index, limits, limit_ids)
        best = tl.where(inside, scores, -float("inf"))
        if rule == COUPLED:
            if tl.max(inside.to(tl.int32), 0) > 0:
                best = best + gumbel_of(tl.load(fields + index * F + 2), columns)
    if rule == REJECTION:
        weights = tl.exp(best)
        first = entries + tl.load(fields + index * F + 6)
        for place in range(0, tl.load(fields + index * F + 7).to(tl.int32)):
            weights = tl.where(columns == tl.load(first + place), 0.0, weights)
        tl.store(sums + index * tiles + tile, tl.sum(weights, 0))
    else:
        largest = tl.max(best, 0)
        tl.store(sums + index * tiles + tile, largest)
        tl.store(ids + index * tiles + tile, tl.min(tl.where(best == largest, columns, width), 0))


@jit()
def tile_mass(sums, index, tiles, tile, divisor, touched, left, TILE: constexpr):
    """What is left in a tile."""
    mass = tl.load(sums + index * tiles + tile) / divisor
    return mass + tl.sum(tl.where(touched // TILE == tile, left, 0.0), 0)


@jit()
def tested(
    values, stride, width, fields, numbers, entries, shares, largest, limits, limit_ids, sums, tiles, probs, index,
    TILES: constexpr, TOUCHED: constexpr,
):  # fmt: skip
    """Tests a row's siblings in order; writes what each has left. Returns ids with draft probabilities, what is left of
    them after all tests, and what the weights of all others are divided by."""
    places, lanes = tl.arange(0, TILES), tl.arange(0, TOUCHED)
    count = tl.load(fields + index * F + 7)
    touched = tl.load(entries + tl.load(fields + index * F + 6) + lanes, mask=lanes < count, other=width)
    own = values_at(values, stride, width, fields, index, touched)
    scores = scores_of(own, largest, numbers, index)
    inside = within(own, scores, touched, fields, index, limits, limit_ids)
    left = tl.where(inside, tl.exp(scores), 0.0)
    rest = tl.sum(tl.load(sums + index * tiles + places, mask=places < tiles, other=0.0), 0)
    divisor = rest + tl.sum(left, 0)
    left, rest = left / divisor, rest / divisor
    first, first_share = tl.load(fields + index * F + 8), tl.load(fields + index * F + 10)
    for test in range(0, tl.load(fields + index * F + 9).to(tl.int32)):
        if test > 0:
            again = rest + tl.sum(left, 0)
            left, rest, divisor = left / again, rest / again, divisor * again
        token = tl.load(entries + first + 2 * test)
        tl.store(probs + tl.load(entries + first + 2 * test + 1), tl.sum(tl.where(touched == token, left, 0.0), 0))
        share = tl.load(shares + first_share + test * count + lanes, mask=lanes < count, other=0.0)
        fewer = tl.where(share > 0, tl.maximum(left - share, 0.0), left)
        left = tl.where((rest == 0) & (tl.max(fewer, 0) == 0), left, fewer)
    return touched, left, divisor


@jit()
def drawn_tile(sums, index, tiles, divisor, touched, left, uniform, TILE: constexpr):
    """The tile of a row's draw, what all tiles before it have, and the draw as a sum."""
    total = tl.full([], 0.0, tl.float64)
    for tile in range(0, tiles):
        total += tile_mass(sums, index, tiles, tile, divisor, touched, left, TILE)
    drawn = uniform * total
    chosen, running, before = -1, tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    last, before_last = 0, tl.full([], 0.0, tl.float64)
    for tile in range(0, tiles):
        mass = tile_mass(sums, index, tiles, tile, divisor, touched, left, TILE)
        last, before_last = tl.where(mass > 0, tile, last), tl.where(mass > 0, running, before_last)
        is_it = (chosen < 0) & (mass > 0) & (running + mass > drawn)
        chosen, before = tl.where(is_it, tile, chosen), tl.where(is_it, running, before)
        running += mass
    return tl.where(chosen < 0, last, chosen), tl.where(chosen < 0, before_last, before), drawn


@jit("first_prob")
def finish_kernel(
    values, stride, width, fields, numbers, entries, shares, maxima, limits, limit_ids, sums, ids, scratch, out,
    first_prob, tiles, TILE: constexpr, TILES: constexpr, TOUCHED: constexpr,
):  # fmt: skip
    """The token of each row, and what tested tokens have left, behind `first_prob` of `out`.  grid: (rows,)"""
    index = tl.program_id(0)
    places = tl.arange(0, TILES)
    if tl.load(fields + index * F + 1) == REJECTION:
        largest = largest_of(maxima, index, tiles, TILES)
        touched, left, divisor = tested(
            values, stride, width, fields, numbers, entries, shares, largest, limits, limit_ids, sums, tiles,
            out + first_prob, index, TILES, TOUCHED,
        )  # fmt: skip
        uniform = tl.load(numbers + index * N + 3)
        tile, before, drawn = drawn_tile(sums, index, tiles, divisor, touched, left, uniform, TILE)
        columns = tile * TILE + tl.arange(0, TILE)
        own = values_at(values, stride, width, fields, index, columns)
        scores = scores_of(own, largest, numbers, index)
        inside = within(own, scores, columns, fields, index, limits, limit_ids)
        lanes = scratch + index * TILE + tl.arange(0, TILE)
        tl.store(lanes, tl.where(inside, tl.exp(scores) / divisor, 0.0))
        tl.debug_barrier()
        tl.store(
            scratch + index * TILE + touched - tile * TILE, left, mask=(touched // TILE == tile) & (touched < width)
        )
        tl.debug_barrier()
        masses = tl.load(lanes)
        crosses = (masses > 0) & (before + tl.cumsum(masses, 0) > drawn)
        lowest = tl.min(tl.where(crosses, columns, width), 0)
        token = tl.where(lowest < width, lowest, tl.max(tl.where(masses > 0, columns, 0), 0))
    else:
        best = tl.load(sums + index * tiles + places, mask=places < tiles, other=-float("inf"))
        own_ids = tl.load(ids + index * tiles + places, mask=places < tiles, other=width)
        lowest = tl.min(tl.where(best == tl.max(best, 0), own_ids, width), 0)
        token = tl.minimum(lowest, width - 1)
    tl.store(out + index, token.to(tl.float64))


class Tables(NamedTuple):
    """What kernels read of n rows, on the values' device.

    fields [n, FIELDS] int64: row of the values, rule (0 GREEDY, 1 REJECTION, 2 COUPLED), key of the noise, place in
    `selected` or -1, top_k or 0, ranked numbers used; of draft probabilities the first of `entries`, their number; of
    tests the first of `entries` (a token, and the place of its probability), their number, the first of `shares`.
    numbers [n, NUMBERS] float64: temperature, least score, top_p, uniform number. selected: rows with top_k or top_p,
    [m] int64; shares float64: of each test the draft probabilities of the row's entries.
    """

    fields: torch.Tensor
    numbers: torch.Tensor
    selected: torch.Tensor
    entries: torch.Tensor
    shares: torch.Tensor
    test_count: int
    touched_max: int  # entries of one row
    has_totals: bool  # some row has top_p without top_k


def sample(values: torch.Tensor, tables: Tables, ranked: torch.Tensor | None) -> torch.Tensor:
    """Returns float64: the token of each row, then the target probabilities of tested tokens, then for each selected
    row 1 where `ranked` held too little of its nucleus, else 0.

    values [rows, width] float32 or float64; ranked [m, columns]: the largest numbers of the selected rows, in order.
    """
    width, device = values.shape[1], values.device
    rows, tiles, selected_count = len(tables.fields), cdiv(width, TILE), len(tables.selected)
    doubles: dict[str, Any] = {"dtype": torch.float64, "device": device}
    maxima, sums = torch.empty(rows, tiles, **doubles), torch.empty(rows, tiles, **doubles)
    ids = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    limits, limit_ids = torch.empty(rows, 2, **doubles), torch.empty(rows, 2, dtype=torch.int64, device=device)
    out = torch.empty(rows + tables.test_count + selected_count, **doubles)
    scratch = torch.empty(rows, TILE, **doubles)
    sizes = {"TILE": TILE, "TILES": power_of_two(tiles)}
    own = values, values.stride(0), width, tables.fields
    run(maxima_kernel, (rows, tiles), *own, maxima, tiles, TILE=TILE)
    if ranked is not None:
        chosen = *own, tables.numbers, tables.selected
        if tables.has_totals:
            of_totals = *chosen, maxima, sums, tiles
            # With WARPS it spills on compute capability 10.0.
            run(totals_kernel, (selected_count, tiles), *of_totals, warps=2 * WARPS, **sizes)
        missed = out[rows + tables.test_count :]
        its = ranked, ranked.shape[1], maxima, sums, limits, limit_ids, missed, tiles
        run(limits_kernel, (selected_count,), *chosen, *its, **sizes, BLOCK=RANKED)
    every = *own, tables.numbers, tables.entries
    run(race_kernel, (rows, tiles), *every, maxima, limits, limit_ids, sums, ids, tiles, **sizes)
    more = tables.shares, maxima, limits, limit_ids, sums, ids, scratch, out, rows, tiles
    run(
        finish_kernel,
        (rows,),
        *every,
        *more,
        **sizes,
        TOUCHED=max(TOUCHED_MIN, power_of_two(max(1, tables.touched_max))),
    )
    return out
