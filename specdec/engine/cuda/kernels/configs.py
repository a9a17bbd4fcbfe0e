"""How a product is cut into tiles: a function of the weight's shape alone, so that a row has the same bits in a step of
any number of rows."""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 16  # rows of a tile: the short side of a tensor core's instruction, twice
HEAD_TILE = 64  # ids of a tile of the output layer
WIDE_OUTPUTS = 8192  # this many outputs are enough tiles of 32 to keep every multiprocessor busy


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """`tile` outputs of a block of threads; `step` inputs of one turn of its loop, cut into `slices` that each have a
    sum of their own; `stages` turns whose loads are under way; `warps` of 32 threads. All powers of two but `stages`.
    """

    tile: int
    step: int
    slices: int
    stages: int
    warps: int


def product_config(outputs: int, inputs: int) -> ProductConfig:
    """The configuration of a weight [outputs, inputs]. Its tile is a function of `outputs` alone (`output_tile`)."""
    tile = output_tile(outputs)
    step = _step(inputs, 256 if tile == 16 else 128)
    return ProductConfig(tile, step, min(4, step // 16), stages=4, warps=4)


def output_tile(outputs: int) -> int:
    """The tile of a product with this number of outputs: sums of squares of a row come one for each tile."""
    return 16 if outputs < WIDE_OUTPUTS else 32


def qkv_config(outputs: int, inputs: int, head_size: int) -> ProductConfig:
    """The configuration of a query-key-value product: a tile lies within one head."""
    tile = 16 if head_size % 32 else output_tile(outputs)
    step = _step(inputs, 256 if tile == 16 else 128)
    return ProductConfig(tile, step, min(4, step // 16), stages=4, warps=4)


def head_config(inputs: int) -> ProductConfig:
    """The configuration of an output layer."""
    step = _step(inputs, 128)
    return ProductConfig(HEAD_TILE, step, min(4, step // 16), stages=4, warps=4)


def head_tiles(outputs: int) -> int:
    """The number of tiles of an output layer of `outputs` ids."""
    return -(-outputs // HEAD_TILE)


def sum_parts(hidden: int) -> int:
    """The number of sums of squares that a row of `hidden` elements has: one for each tile of the product before."""
    return -(-hidden // output_tile(hidden))


def _step(inputs: int, most: int) -> int:
    """The largest power of two from 64 to `most` that divides `inputs`; 64 or, for fewer inputs, less if none does."""
    fitting = [step for step in (256, 128, 64) if step <= most and inputs % step == 0]
    return fitting[0] if fitting else 64 if inputs > 32 else 32 if inputs > 16 else 16
