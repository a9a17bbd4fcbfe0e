"""The picture of a step's results, drawn from their JSON: rows beside the reading of the weights, and both servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import plot


def picture(written: dict[str, Any], file: Path) -> None:
    """A panel for each part that was measured. Raises ConfigError without matplotlib."""
    plot.require()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {"rows": _draw_rows, "served": _draw_served}
    measured = {part: draw for part, draw in panels.items() if part in written}
    if not measured:
        return
    chart, axes = pyplot.subplots(1, len(measured), figsize=(6 * len(measured), 4), squeeze=False, layout="constrained")
    for axis, (part, draw) in zip(axes.flat, measured.items()):
        draw(axis, written[part]["measurements"])
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8)
    chart.savefig(file, dpi=150)
    pyplot.close(chart)


def _name(own: dict[str, Any]) -> str:
    return f"{own['model']}, {own['threads']} thread{'s' * (own['threads'] > 1)}"


def _draw_rows(axis: Any, measurements: list[dict[str, Any]]) -> None:
    """Steps over reading, by rows."""
    for own in measurements:
        reading_ms = own["stored_bytes"] / own["gb_per_s"] / 1e6
        points = [(int(rows), ms / reading_ms) for rows, ms in own["chain_ms"].items()]
        axis.plot(*zip(*points), marker="o", markersize=4, label=_name(own))
    axis.axhline(1.0, color="#555555", linewidth=1.0, linestyle="--", label="reading the weights once")
    counts = [int(rows) for rows in measurements[0]["chain_ms"]]
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_xlabel("rows of a step")
    axis.set_ylabel("step / reading")
    axis.set_ylim(bottom=0)


def _draw_served(axis: Any, measurements: list[dict[str, Any]]) -> None:
    """Tokens a second of both servers."""
    places = range(len(measurements))
    for shift, (key, label) in enumerate((("tokens_per_s", "ours, plain"), ("their_tokens_per_s", "llama.cpp, plain"))):
        rates = [own[key] or 0.0 for own in measurements]
        axis.bar([place + 0.4 * shift for place in places], rates, 0.38, label=label)
    axis.set_xticks([place + 0.2 for place in places], [_name(own).replace(", ", "\n") for own in measurements])
    axis.set_ylabel("tokens/s, one stream")
