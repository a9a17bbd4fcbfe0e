"""The measurements of the engine as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from bench.engine.products import ProductMeasurement
from bench.engine.sampler import SamplerMeasurement
from bench.engine.steps import StepMeasurement
from bench.engine.streams import StreamMeasurement, gain

LEFT = ("model", "type", "rule", "context")


def table_of(title: str, columns: Sequence[str]) -> Table:
    """An empty table; words to the left, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in LEFT else "right")
    return table


def row_table(steps: Sequence[StepMeasurement]) -> Table:
    """One sequence: milliseconds by rows and context, and the share of the memory limit."""
    return _grid(
        "One sequence, ms of a step by rows (share of the memory limit)", [s for s in steps if s.sequences == 1]
    )


def sequence_table(steps: Sequence[StepMeasurement], rows: int) -> Table:
    """Several sequences of `rows` rows each."""
    title = (
        f"{rows} row{'s' if rows > 1 else ''} of each sequence, ms of a step by sequences (share of the memory limit)"
    )
    return _grid(title, [step for step in steps if step.rows == rows], by_rows=False)


def _grid(title: str, steps: Sequence[StepMeasurement], by_rows: bool = True) -> Table:
    """A line per model, type and context; a column per row count, or per sequence count."""
    counts = sorted({step.rows if by_rows else step.sequences for step in steps})
    table = table_of(title, ("model", "type", "context", *map(str, counts)))
    lines: dict[tuple[str, str, int], dict[int, StepMeasurement]] = {}
    for step in steps:
        line = lines.setdefault((step.model, step.dtype, step.context), {})
        line[step.rows if by_rows else step.sequences] = step
    for (model, dtype, context), line in lines.items():
        cells = (f"{line[c].step_ms:.1f} ({line[c].limit_share:.0%})" if c in line else "" for c in counts)
        table.add_row(model, dtype, str(context), *cells)
    return table


def product_table(products: Sequence[ProductMeasurement]) -> Table:
    """All products of a step by rows: by the kernels, whose rows have the same bits at every count, and by torch."""
    table = table_of("Products of a step, ms", ("model", "type", "rows", "kernels", "torch", "kernels / torch"))
    for own in products:
        cells = (str(own.rows), f"{own.kernels_ms:.2f}", f"{own.torch_ms:.2f}", f"{own.kernels_ms / own.torch_ms:.2f}")
        table.add_row(own.model, own.dtype, *cells)
    return table


def stream_table(measurements: Sequence[StreamMeasurement]) -> Table:
    """Returns the throughput by streams, and the parts of a step's time."""
    columns = ("model", "type", "streams", "tokens/s", "over one", "step ms", "forward", "sampler", "outside")
    table = table_of("Plain decoding by the engine alone, GREEDY", columns)
    for measurement in measurements:
        over_one = gain(measurements, measurement.model, measurement.dtype, measurement.streams)
        table.add_row(
            measurement.model,
            measurement.dtype,
            str(measurement.streams),
            f"{measurement.tokens_per_s:.0f}",
            "" if over_one is None else f"{over_one:.2f}",
            f"{measurement.step_ms:.2f}",
            f"{measurement.forward_ms:.2f}",
            f"{measurement.sampling_ms:.2f}",
            f"{measurement.outside_ms:.3f}",
        )
    return table


def sampler_table(measurements: Sequence[SamplerMeasurement]) -> Table:
    """SamplerOutput and noise apart, milliseconds by vocabulary and rows."""
    columns = sorted({(measurement.vocabulary, measurement.rows) for measurement in measurements})
    names = (f"{size} × {rows}" for size, rows in columns)
    table = table_of("SamplerOutput, of which noise, ms by vocabulary × rows", ("rule", *names))
    for rule in dict.fromkeys(measurement.rule for measurement in measurements):
        own = {
            (measurement.vocabulary, measurement.rows): measurement
            for measurement in measurements
            if measurement.rule == rule
        }
        table.add_row(rule, *(f"{own[c].sampling_ms:.2f}, {own[c].noise_ms:.2f}" for c in columns))
    return table
