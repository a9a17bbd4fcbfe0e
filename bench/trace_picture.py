"""A picture of a trace: `specdec trace ID --export FILE`, then `python -m bench.trace_picture FILE out.png`.

It draws what Jaeger would: one line a span, below its parent; three and more of one name share a line, as in
`specdec trace`. Spans that failed are red. matplotlib is imported here only.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from specdec.cli.trace_view import FOLD_FROM
from specdec.errors import ConfigError, SpecdecError
from specdec.traces.reader import Line, TraceTree, resource_spans, spans_of

COLORS = {"coordinator": "#2e86c1", "target": "#27792f", "draft": "#e08e0b"}
LINE_COUNT_MAX = 60  # more are not readable on a page
LINE_INCHES = 0.19
FAILED = "#c0392b"


def lines_until(tree: TraceTree, until_ms: float) -> list[Line]:
    """The spans that begin by then, parents before children. ConfigError where there are too many to read."""
    lines = [line for line in tree.lines(tree.root, FOLD_FROM) if line.start_ms < until_ms]
    if len(lines) > LINE_COUNT_MAX:
        raise ConfigError(f"{len(lines)} spans begin before {until_ms:g} ms; choose an earlier --until-ms")
    return lines


def picture(tree: TraceTree, until_ms: float, file: Path) -> None:
    """Draws the waterfall. Raises ConfigError without matplotlib, or for too many spans."""
    if not find_spec("matplotlib"):
        raise ConfigError("pictures need matplotlib: install specdec with its extra, `pip install 'specdec[bench]'`")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    lines = lines_until(tree, until_ms)
    measurement, axes = pyplot.subplots(figsize=(10, 1.0 + LINE_INCHES * len(lines)), layout="constrained")
    for row, line in enumerate(lines):
        service = line.span.service.removeprefix("specdec-")
        durations_ms = [span.duration_ms for span in line.spans]
        for start_ms, duration_ms, span in zip(line.starts_ms, durations_ms, line.spans):
            width_ms = max(min(duration_ms, until_ms - start_ms), until_ms / 400)
            color = FAILED if span.is_failed else COLORS.get(service, "grey")
            axes.barh(row, width_ms, left=start_ms, height=0.72, color=color)
        words = f"{statistics.median(durations_ms):.2f}"
        axes.annotate(words, (1.01, row), xycoords=("axes fraction", "data"), va="center", fontsize=6)
    axes.annotate("ms", (1.01, -1), xycoords=("axes fraction", "data"), va="center", fontsize=6)
    names = [f"{line.span.name}{f' ×{len(line.spans)}' if len(line.spans) > 1 else ''}" for line in lines]
    axes.set_yticks(range(len(lines)), [f"{'    ' * line.depth}{n}" for line, n in zip(lines, names)], fontsize=7)
    for label in axes.get_yticklabels():
        label.set_horizontalalignment("left")
    axes.tick_params(axis="y", pad=135, length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, until_ms)
    axes.set_xlabel("milliseconds since the call, by the coordinator's clock")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.legend(
        handles=[Patch(color=color, label=name) for name, color in {**COLORS, "failed": FAILED}.items()],
        loc="lower left",
        fontsize=7,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    measurement.savefig(file, dpi=110)
    pyplot.close(measurement)


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the export and draws it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.trace_picture", description=__doc__.partition("\n")[0])
    parser.add_argument("export", type=Path, help="what `specdec trace --export` wrote")
    parser.add_argument("picture", type=Path, help="the PNG to write")
    parser.add_argument("--until-ms", type=float, default=math.inf, help="end of the picture [default: of the call]")
    asked = parser.parse_args(arguments)
    try:
        tree = TraceTree(spans_of(resource_spans(asked.export.read_bytes())))
        picture(tree, min(asked.until_ms, tree.root.duration_ms), asked.picture)
    except (OSError, SpecdecError) as error:
        print(f"trace_picture: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
