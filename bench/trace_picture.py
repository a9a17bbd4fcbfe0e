"""A picture of a trace: `specdec trace ID --export FILE`, then `python -m bench.trace_picture FILE out.png`.

It draws what Jaeger would: one line a span, below its parent, from the start of the call to `--until-ms`. matplotlib is
imported here only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from specdec.bench.plot import require
from specdec.errors import ConfigError, SpecdecError
from specdec.telemetry.trace_reader import Line, TraceTree, resource_spans, spans_of

COLORS = {"coordinator": "#2e86c1", "target": "#27792f", "draft": "#e08e0b"}
LINE_COUNT_MAX = 60  # more are not readable on a page
LINE_INCHES = 0.19


def lines_until(tree: TraceTree, until_ms: float) -> list[Line]:
    """The spans that begin by then, parents before children. ConfigError where there are too many to read."""
    lines = [line for line in tree.lines(tree.root) if line.start_ms < until_ms]
    if len(lines) > LINE_COUNT_MAX:
        raise ConfigError(f"{len(lines)} spans begin before {until_ms:g} ms; choose an earlier --until-ms")
    return lines


def picture(tree: TraceTree, until_ms: float, file: Path) -> None:
    """Draws the waterfall. Raises ConfigError without matplotlib, or for too many spans."""
    require()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    lines = lines_until(tree, until_ms)
    measurement, axes = pyplot.subplots(figsize=(10, 1.0 + LINE_INCHES * len(lines)), layout="constrained")
    for row, line in enumerate(lines):
        service = line.span.service.removeprefix("specdec-")
        width_ms = min(line.span.duration_ms, until_ms - line.start_ms)
        axes.barh(
            row, max(width_ms, until_ms / 400), left=line.start_ms, height=0.72, color=COLORS.get(service, "grey")
        )
        words = f"{line.span.duration_ms:.2f} ms"
        is_late = line.start_ms > 0.8 * until_ms
        axes.annotate(
            words,
            (line.start_ms if is_late else line.start_ms + width_ms, row),
            xytext=(-3 if is_late else 3, 0),
            textcoords="offset points",
            ha="right" if is_late else "left",
            va="center",
            fontsize=6,
            annotation_clip=False,
        )
    axes.set_yticks(range(len(lines)), [f"{'    ' * line.depth}{line.span.name}" for line in lines], fontsize=7)
    for label in axes.get_yticklabels():
        label.set_horizontalalignment("left")
    axes.tick_params(axis="y", pad=110, length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, until_ms)
    axes.set_xlabel("milliseconds since the call, by the coordinator's clock")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.legend(
        handles=[Patch(color=color, label=name) for name, color in COLORS.items()], loc="lower left", fontsize=7
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    measurement.savefig(file, dpi=110)
    pyplot.close(measurement)


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the export and draws it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.trace_picture", description=__doc__.partition("\n")[0])
    parser.add_argument("export", type=Path, help="what `specdec trace --export` wrote")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    parser.add_argument("--until-ms", type=float, default=150.0, help="end of the picture [default: 150]")
    asked = parser.parse_args(arguments)
    try:
        picture(TraceTree(spans_of(resource_spans(asked.export.read_bytes()))), asked.until_ms, asked.picture)
    except (OSError, SpecdecError) as error:
        print(f"trace_picture: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
