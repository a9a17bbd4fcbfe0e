"""Attention in Triton's interpreter: against plain arithmetic in float32, and bit for bit against itself.

Storage is NaN wherever no sequence of a step has a key, results are NaN where nothing was written, and so are the
queries of padding rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy
import pytest
import torch

from specdec.engine.cuda.items import GROUP_ROWS, ItemLayout, fill
from specdec.engine.cuda.kernels.attention import attend, attend_blocks, attend_config, combine, make_partials
from specdec.engine.interface import Chunk, RaggedBatch, tree_paths
from tests.support.interpreter import interpreted
from tests.support.kernel_inputs import assert_near, reserved

BF16, FP16 = torch.bfloat16, torch.float16
CPU = torch.device("cpu")
POSITIONS_MAX = 40000


@dataclass(frozen=True)
class Case:
    """Heads of a layer, its rule, and the sequences of a step: (start, rows), and parents of nodes below them."""

    heads: int
    kv_heads: int
    size: int
    sequences: tuple[tuple[int, int, tuple[int, ...]], ...]
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = BF16
    block_size: int = 16
    blocks: int = 2

    def __str__(self) -> str:
        rule = f"window {self.window}, softcap {self.softcap}, {self.dtype}".replace("torch.", "")
        return f"{self.heads}/{self.kv_heads} heads of {self.size}, {rule}, {self.sequences}"


def chunks_of(case: Case) -> list[Chunk]:
    """The sequences of a case. Their blocks are apart and not in order; nodes stand in cells of no path's positions."""
    chunks, used = [], 1
    for start, rows, parents in case.sequences:
        base = start + rows
        paths = [[base + 2 * (len(parents) + base - cell) for cell in path] for path in tree_paths(parents, base)]
        count = -(-max([base, *(path[-1] + 1 for path in paths)]) // case.block_size)
        blocks = [used + count - 1 - index for index in range(count)]
        chunks.append(Chunk(blocks, start, [0] * (rows + len(parents)), 0, paths))
        used += count + 1
    return chunks


def slots_of(chunk: Chunk, cells: Sequence[int], block_size: int) -> torch.Tensor:
    return torch.tensor([chunk.block_ids[cell // block_size] * block_size + cell % block_size for cell in cells])


def seen_by(chunk: Chunk) -> list[list[int]]:
    """The cells that each row sees, in the order of positions."""
    rows = [[*range(position + 1)] for position in range(chunk.start, chunk.base)]
    return rows + [[*range(chunk.base), *path] for path in chunk.paths]


class Layer:
    """Random storage with a key and a value for every cell that a row of the chunks sees, and NaN elsewhere."""

    def __init__(self, case: Case, chunks: Sequence[Chunk]):
        self.case = case
        generator = torch.Generator().manual_seed(len(chunks))
        slot_count = (2 + max(max(chunk.block_ids) for chunk in chunks)) * case.block_size
        shape = (2, slot_count, case.kv_heads, case.size)
        storage = torch.full(shape, torch.nan)
        for chunk in chunks:
            cells = sorted({cell for seen in seen_by(chunk) for cell in seen})
            slots = slots_of(chunk, cells, case.block_size)
            storage[:, slots] = torch.randn(2, len(slots), *shape[2:], generator=generator)
        self.keys, self.values = storage.to(case.dtype).unbind()
        row_count = sum(len(chunk.token_ids) for chunk in chunks)
        self.queries = 2 * torch.randn(row_count, case.heads, case.size, generator=generator).to(case.dtype)

    def run(self, chunks: Sequence[Chunk], queries: torch.Tensor, padding: int = 0) -> torch.Tensor:
        """Attends; returns the results of the rows, and asserts that padding rows are 0."""
        case, live = self.case, len(queries)
        config = attend_config(case.heads, case.kv_heads, case.size)
        layout = ItemLayout(live + padding, case.block_size, config.tile_rows, (None, case.window), 0)
        words = numpy.zeros(layout.word_count(len(chunks), POSITIONS_MAX, 100), dtype=numpy.int32)
        fill(words, RaggedBatch(tuple(chunks)), layout)
        partials = make_partials(layout.row_count, case.heads, case.size, POSITIONS_MAX, CPU)
        for each, poison in ((partials.values, torch.nan), (partials.maxima, torch.inf), (partials.sums, torch.nan)):
            each.fill_(poison)
        nothing = torch.full((padding, *queries.shape[1:]), torch.nan, dtype=case.dtype)
        queries, on_device = torch.cat((queries, nothing)), torch.from_numpy(words)
        out = torch.full_like(queries, torch.nan)
        for group in range(layout.group_count):
            attend(
                *(queries, self.keys, self.values, on_device, layout, partials, case.blocks),
                scaling=case.size**-0.5,
                window=case.window,
                softcap=case.softcap,
                group=group,
            )
            combine(partials, on_device, layout, out, window=case.window, group=group)
        assert not out[live:].any()
        return out[:live]

    def expected(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """[rows, heads, size] float32, by plain arithmetic."""
        case, results = self.case, []
        rows = ((chunk, seen) for chunk in chunks for seen in seen_by(chunk))
        for query, (chunk, seen) in zip(self.queries.float(), rows):
            cells = seen if case.window is None else seen[-case.window :]
            slots = slots_of(chunk, cells, case.block_size)
            group = case.heads // case.kv_heads
            keys, values = (each[slots].float().repeat_interleave(group, 1) for each in (self.keys, self.values))
            scores = torch.einsum("hd,khd->hk", query, keys) * case.size**-0.5
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            results.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
        return torch.stack(results)


TREE = (0, 1, 0, 3, 3, 2)
CASES = (
    Case(4, 2, 64, ((300, 1, ()), (0, 1, ()), (125, 6, ()), (254, 1, TREE))),
    Case(6, 2, 80, ((129, 5, ()), (200, 1, TREE)), window=70, dtype=FP16, block_size=8),
    Case(8, 1, 128, ((60, 5, ()), (127, 2, (0, 0))), softcap=2.0, block_size=256),
    Case(40, 1, 64, ((64, 1, ()),)),  # more heads of one key than lanes
    Case(2, 2, 256, ((2100, 2, ()),), block_size=256),  # splits of two sizes
    Case(2, 1, 64, ((33100, 3, (0, 1)),), window=500, block_size=256),  # of the third
)


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_that_of_plain_arithmetic(case: Case) -> None:
    """Claim: `attend` and `combine` compute softmax(q k^T) v over what each row sees: chains and trees, windows,
    softcaps, grouped heads, one split and many, blocks of several sizes.

    Conclusive: float32 arithmetic over the cells that a row sees; a key too many is NaN, one that is missing or twice
    is off by more than the roundings; results not written, and those read without having been, are no numbers."""
    chunks = chunks_of(case)
    layer = Layer(case, chunks)
    assert_near(layer.run(chunks, layer.queries, padding=3), layer.expected(chunks), case.dtype)


@interpreted
def test_a_row_has_the_same_bits_at_every_width() -> None:
    """Claim: a row's result has the same bits in steps of 1, 2, 5, 8 and 16 rows, beside sequences whose keys, values
    and queries are NaN, with padding or none, and for any number of blocks of threads.

    Conclusive: rows on both sides of a split's boundary, compared bit for bit with those of one step of 16."""
    case = Case(2, 1, 64, ((120, 16, ()), (140, 2, ())))
    (chunk, beside) = chunks_of(case)
    layer = Layer(case, [chunk, beside])
    layer.keys[slots_of(beside, range(142), 16)] = torch.nan
    layer.values[slots_of(beside, range(142), 16)] = torch.nan
    layer.queries[16:] = torch.nan
    whole = layer.run([chunk], layer.queries[:16])
    assert whole.isfinite().all()
    for first, count in ((0, 1), (15, 1), (6, 2), (4, 5), (8, 8)):
        part = replace(chunk, start=120 + first, token_ids=[0] * count)
        its = layer.queries[first : first + count]
        layer.case = replace(case, blocks=1 + first % 5)
        assert torch.equal(layer.run([part], its, padding=first % 2), whole[first : first + count]), (first, count)
        if count == 5:
            both = layer.run([beside, part], torch.cat((layer.queries[16:], its)))
            assert torch.equal(both[2:], whole[first : first + count])
            assert both[:2].isnan().all()


@interpreted
@pytest.mark.parametrize("window", [None, 70])
def test_a_node_has_the_bits_of_a_chain(window: int | None) -> None:
    """Claim: a node's result has the same bits in its tree, which reads shared splits once, as the only path of its
    tree, and as the end of a chain of the same keys in cells of their positions.

    Conclusive: every node of a tree that branches just before a split's boundary, bit for bit."""
    case = Case(2, 1, 64, ((122, 4, (0, 1, 2, 1, 0, 5)),), window)
    (chunk,) = chunks_of(case)
    layer = Layer(case, [chunk])
    nodes = layer.run([chunk], layer.queries)[4:]
    chain_blocks = [max(chunk.block_ids) + 1 + index for index in range(9)]
    keys, values = layer.keys, layer.values
    more = torch.full((9 * 16, *keys.shape[1:]), torch.nan, dtype=BF16)
    for index, path in enumerate(chunk.paths):
        query = layer.queries[4 + index : 5 + index]
        layer.keys, layer.values = keys, values
        alone = Chunk(chunk.block_ids, 126, [0], 0, [path])
        assert torch.equal(layer.run([alone], query)[0], nodes[index]), path
        cells = [*range(126), *path]
        chain = Chunk(chain_blocks, len(cells) - 1, [0], 0)
        layer.keys, layer.values = torch.cat((keys, more)), torch.cat((values, more))
        ours, theirs = (slots_of(one, its, 16) for one, its in ((chain, range(len(cells))), (chunk, cells)))
        layer.keys[ours], layer.values[ours] = keys[theirs], values[theirs]
        assert torch.equal(layer.run([chain], query)[0], nodes[index]), path


@interpreted
def test_a_prompt_has_the_bits_of_decodes() -> None:
    """Claim: rows of a step with more than one group of rows have the bits that they have in a step of their own, also
    where a tree's rows lie in two groups. Conclusive: compared bit for bit, at both sides of the groups' border."""
    case = Case(1, 1, 32, ((0, GROUP_ROWS - 3, ()), (20, 1, TREE)), blocks=4)
    prompt, tree = chunks_of(case)
    layer = Layer(case, [prompt, tree])
    together = layer.run([prompt, tree], layer.queries)
    assert_near(together, layer.expected([prompt, tree]), BF16)
    rows = slice(GROUP_ROWS - 3, None)
    assert torch.equal(together[rows], layer.run([tree], layer.queries[rows]))
    last = replace(prompt, start=GROUP_ROWS - 4, token_ids=[0])
    assert torch.equal(together[GROUP_ROWS - 4 :][:1], layer.run([last], layer.queries[GROUP_ROWS - 4 :][:1]))


@interpreted
def test_slots_may_be_far() -> None:
    """Claim: keys and values are read from slots more than 2^31 elements behind the first, by a table and by a path.

    Conclusive: an offset that wraps around in 32 bits lands in zeros before the first slot, and the result is that of
    near slots."""
    case = Case(2, 1, 64, ((30, 2, (0, 0)),))
    (chunk,) = chunks_of(case)
    layer = Layer(case, [chunk])
    near = layer.run([chunk], layer.queries)
    shift = 2**31 // (64 * 16) + 1  # blocks
    count = (shift * 16 + len(layer.keys)) * 64
    far = [reserved(2**31 + count, BF16)[2**31 :].view(-1, 1, 64) for _ in range(2)]
    for place, its in zip(far, (layer.keys, layer.values)):
        place[shift * 16 :] = its
    layer.keys, layer.values = far
    moved = replace(chunk, block_ids=[block + shift for block in chunk.block_ids])
    assert torch.equal(layer.run([moved], layer.queries), near)


def test_every_shape_of_heads_has_a_configuration() -> None:
    """Claim: 16 or 32 lanes hold at least one row of all heads that share a key, or a part of them; other shapes are
    refused with their limits. Conclusive: all shapes up to 128 heads."""
    for group in range(1, 129):
        config = attend_config(2 * group, 2, 64)
        assert config.lanes in (16, 32) and config.tile_rows >= 1
        assert config.heads == min(group, config.lanes)
    assert [attend_config(32, 8, 64).tile_rows, attend_config(28, 4, 128).tile_rows] == [4, 4]
    for heads, kv_heads, size in ((6, 4, 64), (4, 4, 8), (4, 4, 264), (4, 4, 68)):
        with pytest.raises(ValueError, match="they must be heads a multiple of key heads"):
            attend_config(heads, kv_heads, size)


def test_blocks_of_threads_are_bounded() -> None:
    """Claim: one row has a block for every split at any context; many rows have no more than a launch can take."""
    assert attend_blocks(1, 131072, 8) == 70
    assert attend_blocks(64, 131072, 8) == 128 and attend_blocks(128, 131072, 4000) == 1
