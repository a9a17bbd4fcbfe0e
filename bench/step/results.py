"""The measurements as tables and bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from bench.bars import Bar, worst_of
from bench.draft.__main__ import DraftMeasurement
from bench.step.parts import PartMeasurement
from bench.step.rows import RowMeasurement
from bench.step.served import ServedMeasurement
from specdec.engine.cpu.kernels import kernels

CHAT, DEEPENED = "chat model", "deepened"
CHAT_4, CHAT_8, CHAT_FP8 = "chat model, 4 bits", "chat model, 8 bits", "chat model, FP8"
# Plain decoding over llama.cpp's: goal, stretch.
GAINS = {CHAT: (1.3, 1.6), DEEPENED: (1.5, 2.3), CHAT_4: (1.2, 1.6), CHAT_8: (1.2, 1.6)}
PACKED = {CHAT_4: 0.5, CHAT_8: 0.65, CHAT_FP8: 0.65}  # the step of one row over bfloat16's
FLAT = {4: (1.2, 1.05), 8: (1.7, 1.25)}  # T(rows) / T(1)
FLAT_BFLOAT16 = 1.15  # with instructions that multiply bfloat16
DRAFT = {1: (0.35, 0.25), 8: (0.8, 0.45)}  # by nodes
BFLOAT16_FAMILY = "avx512_bf16"


def multiplies_bfloat16() -> bool:
    """Whether the kernels here use instructions for it."""
    used = kernels()
    return used is not None and used.family == BFLOAT16_FAMILY


def row_bars(measurements: Sequence[RowMeasurement], has_bfloat16: bool) -> list[Bar]:
    """Of the chat model: the limit, rows, the tree, packed weights."""
    own = [measurement for measurement in measurements if measurement.model == CHAT]
    limits = {measurement.name: measurement.over_reading for measurement in own}
    bars = [worst_of("chat model, step of one row / reading its weights", 1.15, limits, True, 1.05)]
    for rows, (bound, stretch) in FLAT.items():
        bound, best = (FLAT_BFLOAT16, None) if has_bfloat16 and rows == 8 else (bound, stretch)
        ratios = {measurement.name: measurement.over_one_row[rows].median for measurement in own}
        bars.append(worst_of(f"chat model, T({rows} rows) / T(1)", bound, ratios, True, best))
    trees = {measurement.name: measurement.tree_over_chain.median for measurement in own}
    bars.append(worst_of("chat model, tree of 8 rows on 4 paths / chain of 8", 1.05, trees, True))
    dense = {measurement.threads: measurement.chain_ms[1] for measurement in own}
    for model, bound in PACKED.items():
        packed = [each for each in measurements if each.model == model and each.threads in dense]
        steps = {each.name: each.chain_ms[1] / dense[each.threads] for each in packed}
        bars.append(worst_of(f"{model}, step of one row / bfloat16's", bound, steps, True))
    return bars


def served_bars(measurements: Sequence[ServedMeasurement]) -> list[Bar]:
    """Of each model beside llama.cpp; a long prompt's of all models."""
    bars = []
    for model, (bound, stretch) in GAINS.items():
        gains = {own.name: own.gain.median for own in measurements if own.model == model and own.gain}
        bars.append(worst_of(f"{model}, plain decoding / llama.cpp's", bound, gains, stretch=stretch))
    long = {own.name: own.long_ratio.median for own in measurements if own.long_ratio}
    return [*bars, worst_of("prompt of 1,000 tokens / llama.cpp's time", 1.3, long, True, 1.0)]


def draft_bars(measurements: Sequence[DraftMeasurement]) -> list[Bar]:
    """The worst of rules and contexts."""
    bars = []
    for nodes, (bound, stretch) in DRAFT.items():
        ratios = {own.name: own.ratio.median for own in measurements if own.nodes == nodes}
        claim = f"draft's step / bare loop of transformers, {nodes} node{'s' * (nodes > 1)}"
        bars.append(worst_of(claim, bound, ratios, True, stretch))
    return bars


def _table(title: str, first: Sequence[str], columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in first:
        table.add_column(name)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def row_table(measurements: Sequence[RowMeasurement]) -> Table:
    """A line per model and thread count."""
    chains = list(measurements[0].chain_ms)
    columns = ("GB/s", "reading", "least", *(f"T({rows})" for rows in chains), "tree")
    ratios = ("T(1) / reading", "least", *(f"T({rows}) / T(1)" for rows in chains[1:]), "tree / chain")
    title = "one sequence after 100 tokens, ms; medians over turns, and the least of one row"
    table = _table(title, ("model", "threads"), (*columns, *ratios))
    for own in measurements:
        sizes = f"{own.gb_per_s:.1f}", f"{own.reading_ms:.2f}", f"{own.least_ms:.2f}"
        limits = f"{own.over_reading:.2f}", f"{own.least_ms / own.reading_ms:.2f}"
        times = *(f"{ms:.2f}" for ms in own.chain_ms.values()), f"{own.tree_ms:.2f}"
        over = *(f"{ratio.median:.2f}" for ratio in own.over_one_row.values()), f"{own.tree_over_chain.median:.2f}"
        table.add_row(own.model, str(own.threads), *sizes, *times, *limits, *over)
    return table


def served_table(measurements: Sequence[ServedMeasurement]) -> Table:
    """A line per model and thread count."""
    beside = "llama.cpp", "ours / its [95 %]"
    columns = ("tokens/s", *beside, "1,000 tokens ms", *beside, "equal texts")
    table = _table("plain decoding by servers, one stream, greedy; medians over prompts", ("model", "threads"), columns)
    for own in measurements:
        theirs = "" if own.their_tokens_per_s is None else f"{own.their_tokens_per_s:.1f}"
        their_long = "" if own.their_long_ms is None else f"{own.their_long_ms:.0f}"
        rates = f"{own.tokens_per_s:.1f}", theirs, str(own.gain or "")
        times = f"{own.long_ms:.0f}", their_long, str(own.long_ratio or "")
        equal = f"{own.equal_texts} of {own.text_count}" if theirs else ""
        table.add_row(own.model, str(own.threads), *rates, *times, equal)
    return table


def part_table(measurements: Sequence[PartMeasurement]) -> Table:
    """A line per model and thread count."""
    columns = ("forward", "plan", "products", "attention", "norms, the rest", "sampler", "engine around")
    table = _table("a step of one row by part, ms", ("model", "threads"), columns)
    for own in measurements:
        inside = own.planning_ms, own.products_ms, own.attention_ms, own.rest_ms
        parts = (own.forward_ms, *inside, own.sampling_ms, own.outside_ms)
        table.add_row(own.model, str(own.threads), *(f"{ms:.2f}" for ms in parts))
    return table
