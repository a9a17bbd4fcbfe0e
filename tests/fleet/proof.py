"""The proof that routing spreads texts and finds caches: its runs and its bars.

One workload goes by keys and, for comparison, by two random choices; a heavier one, which leaves few places free once a
tenth of the targets is lost, shows that none is refused while there is space.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.table import Table

from bench.bars import Bar, worst_of
from tests.fleet.world import Measured, Size, World

BY_KEYS, BY_TWO, NEARLY_FULL = "by keys", "two random choices", "by keys, nearly full"
NEARLY_FULL_TEXTS = 54  # the mean of a target with 64 places, before a tenth is lost


def measure(size: Size, seed: int, progress: Callable[[str, float], None]) -> dict[str, Measured]:
    """Runs the workloads; returns what was measured by their names."""
    sizes = {
        BY_KEYS: size,
        BY_TWO: size,
        NEARLY_FULL: replace(size, texts_mean=NEARLY_FULL_TEXTS, steady_s=5, after_s=15),
    }
    return {
        name: World(own, seed, is_keyed=name != BY_TWO).run(lambda share, name=name: progress(name, share))
        for name, own in sizes.items()
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def moved_ratio(measured: Measured) -> float:
    """Moved texts of the survivor that got most of them, over the mean."""
    counts = list(measured.moved.values())
    return max(counts) * len(counts) / max(1, sum(counts))


def bars(ways: dict[str, Measured]) -> list[Bar]:
    """The bars of routing by keys."""
    keys, two, full = (ways[name] for name in (BY_KEYS, BY_TWO, NEARLY_FULL))
    uncached = keys.uncached_tokens / two.uncached_tokens
    moved = {name: moved_ratio(ways[name]) for name in (BY_KEYS, NEARLY_FULL)}
    return [
        Bar("texts a target, max/mean, median", 1.25, statistics.median(keys.steady), is_limit=True),
        Bar("texts a target, max/mean, p99", 1.35, percentile(keys.steady, 0.99), is_limit=True),
        Bar("the same while a tenth is lost and returns, p99", 1.35, percentile(keys.after, 0.99), is_limit=True),
        Bar("uncached prompt tokens over two random choices", 0.6, uncached, is_limit=True),
        worst_of("moved texts of one survivor over the mean", 3.0, moved, is_limit=True),
        Bar(
            "texts refused while a target had space",
            0,
            keys.refused_with_space + full.refused_with_space,
            is_limit=True,
        ),
    ]


def table(ways: dict[str, Measured]) -> Table:
    """What was measured, a column for each way."""
    shown = Table(title="texts on targets and drafts")
    shown.add_column("")
    for name in ways:
        shown.add_column(name, justify="right")
    for row, of in ROWS.items():
        shown.add_row(row, *(of(measured) for measured in ways.values()))
    return shown


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}, {percentile(values, 0.99):.2f}"


ROWS: dict[str, Callable[[Measured], str]] = {
    "texts": lambda one: f"{one.text_count:,}",
    "uncached share of prompt tokens": lambda one: f"{one.uncached_tokens / one.prompt_tokens:.3f}",
    "the same with one cache for all": lambda one: f"{one.unseen_tokens / one.prompt_tokens:.3f}",
    "texts a target, max/mean: median, p99": lambda one: _spread(one.steady),
    "the same after the loss": lambda one: _spread(one.after),
    "moved texts": lambda one: f"{sum(one.moved.values()):,}",
    "of one survivor: most, mean": lambda one: f"{max(one.moved.values())}, {statistics.mean(one.moved.values()):.1f}",
    "refusals by targets": lambda one: f"{one.refusals}",
    "waits of moved texts": lambda one: f"{one.waited}",
    "texts refused": lambda one: f"{one.refused}",
    "texts a draft, max/mean: median, p99": lambda one: _spread(one.draft_balance),
    "ms to a node of the chosen draft, of a random one": lambda one: (
        f"{1e3 * statistics.mean(one.draft_wait_s):.2f}, {1e3 * statistics.mean(one.random_draft_wait_s):.2f}"
    ),
}
