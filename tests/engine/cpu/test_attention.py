"""Attention over the paged cache: near float64, and a row's bits are its own.

A row's result is a function of its query and of the keys and values at the positions it sees, and of nothing else: not
of rows beside it, of blocks that hold the keys, of what other slots hold, of the way a prompt is cut, or of threads.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from specdec.engine.cpu.compile_kernels import FLAGS, UNIT, UNITS, NotCompiled, find_compiler
from specdec.engine.cpu.kernels import LIBRARY, SOURCES, Kernels, LayerCache, Rows, ScoreRule, kernels
from specdec.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHAPES = ((9, 3, 64), (4, 4, 8), (8, 2, 80), (2, 1, 20))  # heads, kv heads, head size; 80, 20: no multiple of 64, of 16
RULES = {"plain": (0.0, 0), "window": (0.0, 70), "softcap": (3.0, 0), "both": (3.0, 530)}  # softcap, window
WIDTHS = (*range(1, 71), 127, 128, 129, 511, 512)

pytestmark = pytest.mark.skipif(kernels() is None, reason="native kernels are off")


def rule_of(name: str, head_size: int) -> ScoreRule:
    softcap, window = RULES[name]
    return ScoreRule(scaling=head_size**-0.5, softcap=softcap, window=window)


@dataclass
class World:
    """Sequences whose keys and values [positions, kv heads, head size] lie in a cache; every other slot is not a
    number."""

    native: Kernels
    cache: LayerCache
    tables: list[list[int]]
    keys: list[Tensor]
    values: list[Tensor]
    queries: list[Tensor]  # [positions, heads, head size]

    @property
    def block_size(self) -> int:
        return self.cache.keys.shape[3]

    def slot(self, sequence: int, position: int) -> int:
        return self.tables[sequence][position // self.block_size] * self.block_size + position % self.block_size

    def rows(self, nodes: Sequence[tuple[int, int]], paths: Sequence[Sequence[int]] | None = None) -> Rows:
        """Rows at (sequence, position), each a chain; or with the slots of its path, the last of which is its own."""
        paths = paths or [()] * len(nodes)
        slots = [path[-1] if path else self.slot(*node) for node, path in zip(nodes, paths)]
        ends = numpy.array([position + 1 for _, position in nodes])
        arrays = {
            "sequence": [sequence for sequence, _ in nodes],
            "position": ends - 1,
            "slot": slots,
            "base": ends - [len(path) for path in paths],
            "path_start": numpy.cumsum([0, *map(len, paths)]),
            "path": [slot for path in paths for slot in path],
            "table_start": numpy.cumsum([0, *map(len, self.tables)]),
            "table": [block for table in self.tables for block in table],
        }
        types = {name: numpy.int64 if name.endswith("_start") else numpy.int32 for name in arrays}
        return self.native.rows(
            block_count=self.cache.keys.shape[0],
            block_size=self.block_size,
            **{name: numpy.asarray(values, dtype=types[name]) for name, values in arrays.items()},
        )

    def attend(self, rule: ScoreRule, nodes: Sequence[tuple[int, int]]) -> Tensor:
        queries = torch.stack([self.queries[sequence][position] for sequence, position in nodes])
        return self.native.attend(self.cache, self.rows(nodes), rule, queries)


def make_world(
    native: Kernels,
    lengths: Sequence[int],
    shape: tuple[int, int, int] = (9, 3, 64),
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
) -> World:
    """The numbers depend on lengths, shape and type, not on the size of a block; spare blocks at the end."""
    heads, kv_heads, head_size = shape
    random = torch.Generator().manual_seed(7)
    sides = [
        [torch.randn(n, count, head_size, generator=random).to(dtype) for n in lengths]
        for count in (kv_heads, kv_heads, heads)
    ]
    counts = [-(-n // block_size) for n in lengths]
    blocks = torch.randperm(sum(counts) + 12, generator=random).tolist()
    starts = numpy.cumsum([0, *counts]).tolist()
    tables = [blocks[start:end] for start, end in zip(starts, starts[1:])]
    empty = torch.full((len(blocks), kv_heads, head_size, block_size), float("nan"), dtype=dtype)
    world = World(native, LayerCache(empty, empty.transpose(2, 3).contiguous().clone()), tables, *sides)
    rows = world.rows([(sequence, p) for sequence, n in enumerate(lengths) for p in range(n)])
    native.write(world.cache, rows, torch.cat(world.keys), torch.cat(world.values))
    return world


def float64_of(world: World, rule: ScoreRule, sequence: int, position: int) -> tuple[Tensor, Tensor]:
    """The result of one row [heads, head size] in float64, and a bound of the error of a float32 computation.

    A running sum of n terms errs by at most n u Σ|terms| (Higham, Accuracy and Stability, 3.1): n = head size for a
    score, so a weight errs relatively by twice the largest score's error, and the weighted sums by their count; the
    exponential and the tanh by some units; the result's rounding to its type at last."""
    query = world.queries[sequence][position].double()
    first = max(0, position + 1 - rule.window) if rule.window else 0
    group = query.shape[0] // world.cache.kv_heads
    keys, values = (
        side[sequence][first : position + 1].double().repeat_interleave(group, 1) for side in (world.keys, world.values)
    )
    scores = torch.einsum("hd,phd->hp", query, keys) * rule.scaling
    sizes = torch.einsum("hd,phd->hp", query.abs(), keys.abs()) * abs(rule.scaling)
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    weights = scores.softmax(-1)
    u, count = UNIT_ROUNDOFF[torch.float32], position + 1 - first
    score_error = ((query.shape[1] + 4) * sizes.amax(-1) + 8 * rule.softcap) * u
    spread = (scores.amax(-1) - scores.amin(-1)) * u
    relative = 2 * (score_error + spread) + (2 * count + 20) * u
    result = torch.einsum("hp,phd->hd", weights, values)
    bound = 1.01 * relative[:, None] * torch.einsum("hp,phd->hd", weights, values.abs())
    return result, bound + UNIT_ROUNDOFF[world.cache.dtype] * (result.abs() + bound) + 1e-7


def assert_near_float64(world: World, rule: ScoreRule, nodes: Sequence[tuple[int, int]]) -> None:
    for node, found in zip(nodes, world.attend(rule, nodes)):
        result, bound = float64_of(world, rule, *node)
        assert bool(((found.double() - result).abs() <= bound).all()), (node, (found.double() - result).abs().max())


def assert_widths_agree(world: World, rule: ScoreRule, first: int, widths: Sequence[int]) -> None:
    """Rows of positions from `first` on, alone and in batches of these sizes, on 1 to 4 threads."""
    nodes = [(0, first + i) for i in range(max(widths))]
    torch.set_num_threads(1)
    whole = world.attend(rule, nodes)
    assert bool(whole.isfinite().all())
    for i in range(len(nodes)):
        assert torch.equal(world.attend(rule, nodes[i : i + 1])[0], whole[i])
    for turn, width in enumerate(widths):
        torch.set_num_threads(1 + turn % 4)
        assert torch.equal(world.attend(rule, nodes[:width]), whole[:width]), width


@pytest.mark.parametrize("block_size", (8, 16, 32, 64))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_is_near_float64(native: Kernels, dtype: torch.dtype, block_size: int) -> None:
    """Every shape and rule, rows of several sequences in one call, the first position and those beside a split.

    Conclusive: the bound is derived from the stated order (`float64_of`), so a missing key or a wrong scale is outside
    it."""
    for shape in SHAPES:
        world = make_world(native, (530, 37, 1), shape, dtype, block_size)
        nodes = [(0, p) for p in (0, 1, 15, 16, 100, 510, 511, 512, 529)] + [(1, 36), (2, 0)]
        for name in RULES:
            assert_near_float64(world, rule_of(name, shape[2]), nodes)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_has_its_bits_at_every_width(native: Kernels, rule: str) -> None:
    """Rows alone, in batches of 1 to 70, 127 to 129, 511 and 512 rows, on 1 to 4 threads.

    Conclusive: bits are compared, and the rows cross a split and, with windows, differ in their first key."""
    world = make_world(native, (520 + 512,), (3, 1, 16))
    assert_widths_agree(world, rule_of(rule, 16), 520, WIDTHS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_and_chunks_change_no_bit(native: Kernels, dtype: torch.dtype) -> None:
    """A prompt of 600 tokens whole, in chunks of several sizes, and in blocks of 8, 16, 32 and 64 positions.

    Conclusive: bits are compared between all of them."""
    found = []
    for block_size, chunk in ((16, 600), (8, 7), (32, 128), (64, 511), (8, 600)):
        world = make_world(native, (600,), (6, 2, 24), dtype, block_size)
        nodes = [(0, p) for p in range(600)]
        parts = [world.attend(rule_of("both", 24), nodes[i : i + chunk]) for i in range(0, 600, chunk)]
        found.append(torch.cat(parts))
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block_size", (8, 32))
def test_what_a_row_does_not_see_changes_no_bit(native: Kernels, rule: str, block_size: int) -> None:
    """Later positions, positions before a window, and other sequences become not-a-number; empty slots are so always.

    Conclusive: a key or value that is multiplied, even by zero, makes the result not a number."""
    world = make_world(native, (700, 300), block_size=block_size)
    chosen = rule_of(rule, 64)
    nodes = [(1, p) for p in range(200, 204)] + [(0, p) for first in (200, 600) for p in range(first, first + 16)]
    before = world.attend(chosen, nodes)
    assert bool(before.isfinite().all())
    for kept in (202, 203, 606):  # so that in any tile of rows one sees a position that another does not
        world = make_world(native, (700, 300), block_size=block_size)
        hidden = [(1, p) for p in range(300)] + [(0, p) for p in range(kept + 1, 700)]
        hidden += [(0, p) for p in range(kept + 1 - chosen.window)] if chosen.window else []
        nothing = torch.full((len(hidden), 3, 64), float("nan"))
        native.write(world.cache, world.rows(hidden), nothing, nothing)
        found = world.attend(chosen, nodes)
        assert torch.equal(found[nodes.index((0, kept))], before[nodes.index((0, kept))])
        assert bool(found[1].isnan().all())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_path_of_a_tree_has_the_bits_of_a_chain(native: Kernels, dtype: torch.dtype, rule: str) -> None:
    """Four paths of 1 to 20 nodes each below several bases, their slots scattered among not-a-number, some paths across
    a split, alone and among rows of a chain: each node's row equals the row of a chain that holds the same keys.

    Conclusive: bits are compared with a cache in which the path is an ordinary sequence."""
    for base in (0, 5, 100, 505, 1020):
        for length in (1, 3, 20):
            assert_paths_equal_chains(native, base, length, rule_of(rule, 80), dtype)


def assert_paths_equal_chains(
    native: Kernels, base: int, length: int, rule: ScoreRule, dtype: torch.dtype = torch.float32
) -> None:
    shape, block_size = (4, 2, 80), 8
    end = base + length + 200
    chains = make_world(native, [end] * 4, shape, dtype, block_size)
    for side in (chains.keys, chains.values):
        for other in side[1:]:
            other[:base] = side[0][:base]
    every = [(s, p) for s in range(4) for p in range(end)]
    native.write(chains.cache, chains.rows(every), torch.cat(chains.keys), torch.cat(chains.values))
    nodes = [(s, base + i) for i in range(length) for s in range(4)]
    expected = chains.attend(rule, nodes)
    # The tree: sequence 0 of the same cache, its nodes at scattered slots of blocks that no table holds.
    used = {block for table in chains.tables for block in table}
    spare = [b * block_size + o for o in range(8) for b in range(chains.cache.keys.shape[0]) if b not in used]
    slots = [[spare[(i * 4 + s) % len(spare)] for i in range(length)] for s in range(4)]
    paths = [slots[s][: p - base + 1] for s, p in nodes]
    keys, values = (torch.stack([side[s][p] for s, p in nodes]) for side in (chains.keys, chains.values))
    native.write(chains.cache, chains.rows([(0, p) for _, p in nodes], paths), keys, values)
    # Rows of the sequence itself stand among those of the tree, at positions far from them.
    mixed = [row for i, pair in enumerate(zip(nodes, paths)) for row in (pair, ((0, i * 97 % end), ()))]
    alone = torch.cat([expected, chains.attend(rule, [node for node, _ in mixed[1::2]])])
    for chosen, wanted in (
        (list(zip(nodes, paths)), expected),
        (mixed, alone.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)),
        (mixed[1::2] + mixed[::2], alone.roll(len(nodes), 0)),
    ):
        queries = torch.stack([chains.queries[s][p] for (s, p), _ in chosen])
        rows = chains.rows([(0, p) for (_, p), _ in chosen], [path for _, path in chosen])
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(native.attend(chains.cache, rows, rule, queries), wanted)


def test_instruction_sets_share_their_bits(native: Kernels, tmp_path: Path) -> None:
    """Attention of every type by AVX2 and by AVX-512.

    Conclusive: each is loaded from a library of its own, says its name, and bits are compared."""
    found = []
    for name in ("avx2", "avx512"):
        copied = shutil.copy(LIBRARY, tmp_path / f"{name}.so")
        try:
            other = Kernels(Path(copied), name)
        except ConfigError:
            pytest.skip(f"this processor or library lacks {name}")
        assert other.instructions == name
        worlds = [make_world(other, (530,), (8, 2, 80), dtype, 8) for dtype in DTYPES]
        nodes = [(0, p) for p in range(500, 530)]
        found.append([world.attend(rule_of(rule, 80), nodes) for world in worlds for rule in RULES])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


MISTAKES = {  # name: (text, its replacement) in attention.h
    "masked keys multiplied by zero": (
        ("shared_high = lower(shared_high, w->queries[q].base);", "most = higher(most, w->queries[q].base);"),
        ("if (shared_high <= shared_low)", "shared_high = lower(shared_high, most);\n\\g<0>"),
        ("int64_t shared_low = start,", "int64_t most = 0, shared_low = start,"),
        ("if (p >= own->base) {", "if (own->base < own->end && p >= own->base) {"),
        ("block_size, own->base), high)", "block_size, own->base < own->end ? own->base : high), high)"),
        ("v16_store(w->lanes[q], lanes);", "memset(s + to, 0, (size_t)(KEY_SPLIT - to) * 4);\n\\g<0>"),
    ),
    "splits from the first key seen": (("first / KEY_SPLIT * KEY_SPLIT", "first / LANES * LANES"),),
    "a lane sum in scores": (
        ("for (int q = 0; q < count; q++) {\n        for (int p = 0; p < panels; p++) sums[q][p] = v16_zero();",
         "for (int q = 0; q < QUERY_TILE; q++) {\n        for (int p = 0; p < panels; p++) sums[q][p] = v16_zero();"),
        ("sums[q][p] = v16_fma(element, key[p], sums[q][p]);",
         "sums[q + (count == 1 && d % 2)][p] = v16_fma(element, key[p], sums[q + (count == 1 && d % 2)][p]);"),
        ("v16_store(scores[q] + at + p * LANES, sums[q][p]);",
         "v16_store(scores[q] + at + p * LANES, count == 1 ? v16_add(sums[0][p], sums[1][p]) : sums[q][p]);"),
    ),
}  # fmt: skip


def compile_mistake(folder: Path, name: str) -> Kernels:
    """A library of one instruction set with this mistake in its attention."""
    compiler, usual = find_compiler(), kernels()
    assert usual is not None
    unit = usual.instructions
    sources = Path(shutil.copytree(SOURCES, folder / "native"))
    text = (sources / "attention.h").read_text()
    for old, new in MISTAKES.get(name, ()):
        assert text.count(old) == 1, old
        text = text.replace(old, new.replace("\\g<0>", old))
    (sources / "attention.h").write_text(text)
    flags = next(units[unit] for units in UNITS.values() if unit in units)
    objects = [compiler.compile(sources / UNIT, folder / "unit.o", [*FLAGS, "-O1", *flags, f"-DUNIT={unit}"])]
    common = [source for source in sorted(sources.glob("*.c")) if source.name != UNIT]
    objects += [compiler.compile(each, folder / f"{each.stem}.o", [*FLAGS, f"-DHAVE_{unit}"]) for each in common]
    compiler.run("-shared", "-pthread", "-o", str(folder / "mistake.so"), *map(str, objects))
    return Kernels(folder / "mistake.so", unit)


@pytest.mark.more
@pytest.mark.parametrize("name", ["none", *MISTAKES])
def test_planted_mistakes_are_found(tmp_path: Path, name: str) -> None:
    """The checks above fail for sources with a mistake of the kinds that they are for, and pass for a copy without.

    Conclusive: the same functions are called, and "none" shows that the way of compiling is not what fails."""
    try:
        wrong = compile_mistake(tmp_path, name)
    except NotCompiled as error:
        pytest.skip(str(error))

    def check() -> None:
        test_what_a_row_does_not_see_changes_no_bit(wrong, "plain", 8)
        test_what_a_row_does_not_see_changes_no_bit(wrong, "window", 32)
        assert_widths_agree(make_world(wrong, (520 + 70,), (3, 1, 16)), rule_of("both", 16), 520, range(1, 71))

    if name == "none":
        check()
    else:
        with pytest.raises(AssertionError):
            check()
