"""The plots of the engine: step time against rows and sequences beside the memory limit, and throughput."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import plot
from bench.engine.steps import StepMeasurement
from bench.engine.streams import StreamMeasurement

LIMIT = {"color": "#555555", "linewidth": 1.0, "linestyle": "--", "label": "memory limit"}


def picture(steps: Sequence[StepMeasurement], streams: Sequence[StreamMeasurement], file: Path) -> None:
    """A line of panels per model and type. Raises ConfigError without matplotlib."""
    plot.require()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys((step.model, step.dtype) for step in steps))
    size = (12, 1 + 3 * len(kinds))
    measurement, axes = pyplot.subplots(len(kinds), 3, figsize=size, squeeze=False, layout="constrained")
    for kind, (by_rows, by_sequences, by_streams) in zip(kinds, axes):
        own = [step for step in steps if (step.model, step.dtype) == kind]
        draw_steps(by_rows, [(step.rows, step) for step in own if step.sequences == 1], "rows of one sequence")
        draw_steps(by_sequences, [(step.sequences, step) for step in own if step.rows == 1], "sequences of one row")
        draw_streams(by_streams, [line for line in streams if (line.model, line.dtype) == kind])
        by_rows.set_title(", ".join(kind), fontsize=10)
    measurement.savefig(file, dpi=150)
    pyplot.close(measurement)


def draw_steps(axis: Any, points: Sequence[tuple[int, StepMeasurement]], label: str) -> None:
    """Milliseconds by a count, a line per context; the limit of the shortest."""
    contexts = sorted({step.context for _, step in points})
    for context in contexts:
        line = [(count, step.step_ms) for count, step in points if step.context == context]
        axis.plot(*zip(*sorted(line)), marker="o", markersize=3, label=f"{context} cached")
    limits = [(count, step.limit_ms) for count, step in points if step.context == contexts[0]]
    axis.plot(*zip(*sorted(limits)), **LIMIT)
    axis.set_ylabel("ms of a step")
    _finish(axis, [count for count, _ in points], label)
    axis.legend(frameon=False, fontsize=8)


def draw_streams(axis: Any, measurements: Sequence[StreamMeasurement]) -> None:
    """Tokens per second of all streams together."""
    points = sorted((measurement.streams, measurement.tokens_per_s) for measurement in measurements)
    if points:
        axis.plot(*zip(*points), marker="o", markersize=3)
    axis.set_ylabel("tokens/s, all streams")
    _finish(axis, [count for count, _ in points], "streams")


def _finish(axis: Any, counts: Sequence[int], label: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(set(counts)), [str(count) for count in sorted(set(counts))])
    axis.set_xlabel(label)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
