"""Log-probabilities on a device: of some tokens of each row, and its likeliest tokens, from the raw logits.

Float64; the normaliser is the sum of tiles of TILE columns, added in their order, so the bits of a row depend on its
logits alone. Of equal logits the lowest ids are the likeliest.
"""

from __future__ import annotations

from typing import Any

import torch

from specdec.engine.cuda.kernels.launch import cdiv, constexpr, jit, power_of_two, tl
from specdec.engine.cuda.kernels.sampling import run

TILE = 2048


@jit()
def logits_at(logits, stride, width, rows, index, columns):
    """The logits of a row in these columns, -inf beyond its end.  # float64"""
    own = logits + tl.load(rows + index) * stride
    return tl.load(own + columns, mask=columns < width, other=-float("inf")).to(tl.float64)


@jit()
def row_maximum(maxima, index, tiles, TILES: constexpr):
    """The largest logit of a row."""
    places = tl.arange(0, TILES)
    return tl.max(tl.load(maxima + index * tiles + places, mask=places < tiles, other=-float("inf")), 0)


@jit()
def tile_maxima_kernel(logits, stride, width, rows, maxima, tiles, TILE: constexpr):
    """grid: (rows, tiles)"""
    index, tile = tl.program_id(0), tl.program_id(1)
    own = logits_at(logits, stride, width, rows, index, tile * TILE + tl.arange(0, TILE))
    tl.store(maxima + index * tiles + tile, tl.max(own, 0))


@jit()
def tile_sums_kernel(logits, stride, width, rows, maxima, sums, tiles, TILE: constexpr, TILES: constexpr):
    """grid: (rows, tiles)"""
    index, tile = tl.program_id(0), tl.program_id(1)
    own = logits_at(logits, stride, width, rows, index, tile * TILE + tl.arange(0, TILE))
    weights = tl.exp(own - row_maximum(maxima, index, tiles, TILES))
    tl.store(sums + index * tiles + tile, tl.sum(weights, 0))


@jit()
def store_ties(logits, stride, width, rows, index, bound, first, kept, out, tiles, TILE: constexpr):
    """Writes the `kept` lowest ids of the tokens with a logit to `out`, from `first` on."""
    seen = 0
    for tile in range(0, tiles):
        columns = tile * TILE + tl.arange(0, TILE)
        ties = (logits_at(logits, stride, width, rows, index, columns) == bound) & (columns < width)
        ranks = seen + tl.cumsum(ties.to(tl.int32), 0)
        tl.store(out + first + ranks - 1, columns.to(tl.float64), mask=ties & (ranks <= kept))
        seen += tl.sum(ties.to(tl.int32), 0)


@jit("token_count", "top_count", "ranked_count")
def logprobs_kernel(
    logits, stride, width, rows, tokens, token_count, recovered, ranked, ranked_ids, ranked_count, top_count, maxima,
    sums, out, tiles, TILE: constexpr, TILES: constexpr, TOKENS: constexpr, TOPS: constexpr, HAS_RECOVERED: constexpr,
):  # fmt: skip
    """grid: (rows,)"""
    index = tl.program_id(0)
    places = tl.arange(0, TILES)
    largest = row_maximum(maxima, index, tiles, TILES)
    total = tl.sum(tl.load(sums + index * tiles + places, mask=places < tiles, other=0.0), 0)
    normaliser = tl.log(total)
    lanes = tl.arange(0, TOKENS)
    own = out + index * (token_count + 2 * top_count)
    ids = tl.load(tokens + index * token_count + lanes, mask=lanes < token_count, other=0)
    if HAS_RECOVERED:
        ids = tl.where(lanes == 0, tl.load(recovered + tl.load(rows + index)).to(tl.int64), ids)
    chosen = logits_at(logits, stride, width, rows, index, ids) - largest - normaliser
    tl.store(own + lanes, chosen, mask=lanes < token_count)
    if top_count > 0:
        tops = tl.arange(0, TOPS)
        is_top = tops < top_count
        best = tl.load(ranked + index * ranked_count + tops, mask=is_top, other=-float("inf")).to(tl.float64)
        best_ids = tl.load(ranked_ids + index * ranked_count + tops, mask=is_top, other=width)
        is_before = (best[:, None] > best[None, :]) | (
            (best[:, None] == best[None, :]) & (best_ids[:, None] < best_ids[None, :])
        )
        order = tl.sum((is_before & is_top[:, None]).to(tl.int32), 0)
        tl.store(own + token_count + top_count + order, best - largest - normaliser, mask=is_top)
        last = tl.min(tl.where(is_top, best, float("inf")), 0)
        tl.store(own + token_count + order, best_ids.to(tl.float64), mask=is_top)
        if top_count < ranked_count:
            if tl.load(ranked + index * ranked_count + top_count).to(tl.float64) == last:
                above = tl.sum(((best > last) & is_top).to(tl.int32), 0)
                tl.debug_barrier()
                store_ties(
                    logits, stride, width, rows, index, last, above, top_count - above, own + token_count, tiles, TILE
                )


def row_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, recovered: torch.Tensor | None, top_count: int
) -> torch.Tensor:
    """Returns of each row the log-probabilities of its tokens, then the ids of its likeliest, then those's.

    logits [n, width] float32; rows [m] int64, of the logits; tokens [m, count] int64; recovered [n] float64: ids that
    stand for the first token of each row.  # [m, count + 2 * top_count] float64
    """
    width, (count, token_count) = logits.shape[1], tokens.shape
    top_count, tiles = min(top_count, width), cdiv(width, TILE)
    doubles: dict[str, Any] = {"dtype": torch.float64, "device": logits.device}
    maxima, sums = torch.empty(count, tiles, **doubles), torch.empty(count, tiles, **doubles)
    out = torch.empty(count, token_count + 2 * top_count, **doubles)
    sizes = {"TILE": TILE, "TILES": power_of_two(tiles)}
    own = logits, logits.stride(0), width, rows
    run(tile_maxima_kernel, (count, tiles), *own, maxima, tiles, TILE=TILE)
    run(tile_sums_kernel, (count, tiles), *own, maxima, sums, tiles, **sizes)
    ranked, ranked_ids = sums, rows
    if top_count:
        chosen = logits if count == len(logits) else logits.index_select(0, rows)
        ranked, ranked_ids = chosen.topk(min(top_count + 1, width), dim=1)
    more = ranked, ranked_ids, ranked.shape[1], top_count, maxima, sums, out, tiles
    sizes |= {"TOKENS": power_of_two(token_count), "TOPS": power_of_two(max(1, top_count))}
    its = tokens, token_count, maxima if recovered is None else recovered
    run(logprobs_kernel, (count,), *own, *its, *more, **sizes, HAS_RECOVERED=recovered is not None)
    return out
