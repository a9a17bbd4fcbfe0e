"""Pictures of benchmark results, drawn from their JSON. `python -m bench.plot out/pipeline.json out/pipeline.png`.

matplotlib is optional: it is imported here only, and where it is missing the error says what to install.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError

STYLES: dict[str, dict[str, Any]] = {  # in the order of the legend
    "auto": {"color": "#c0392b", "linewidth": 2.4, "marker": "o", "label": "auto: the policy chooses"},
    "tree": {"color": "#e08e0b", "linewidth": 1.4, "marker": "s", "label": "streamed tree, 8 nodes per step"},
    "chain": {"color": "#2e86c1", "linewidth": 1.4, "marker": "^", "label": "streamed chain"},
    "sync": {"color": "#27792f", "linewidth": 1.4, "marker": "v", "label": "synchronous, best fixed draft length"},
    "off": {"color": "#555555", "linewidth": 1.4, "linestyle": "--", "label": "off: plain decoding"},
    "colocated": {"color": "#27792f", "linewidth": 1.0, "linestyle": "-.", "label": "synchronous, co-located (RTT 0)"},
    "ceiling": {"color": "#000000", "linewidth": 1.0, "linestyle": ":", "label": "ceiling: best plan, simulated"},
}
LABEL_DISTANCE = 1.3  # nearer round trips, as a ratio, would have their labels on each other
RTT_LINEAR_MS = 5.0  # the axis is linear up to here, logarithmic beyond


def is_possible() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def require() -> None:
    """Raises ConfigError where matplotlib is not installed."""
    if not is_possible():
        raise ConfigError("pictures need matplotlib: install specdec with its extra, `pip install 'specdec[bench]'`")


def lines_of(cells: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """(round trip ms, tokens/s) by line, of the cells of one rule."""
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in STYLES}
    for cell in sorted(cells, key=lambda own: own["rtt_ms"]):
        rates = {name: own["tokens_per_s"] for name, own in cell["measurements"].items()}
        synchronous = [rate for name, rate in rates.items() if name.startswith("sync")]
        if synchronous:
            rates["sync"] = max(synchronous)
        rates["ceiling"] = cell["simulated"]["ceiling"]
        for name, line in lines.items():
            if name in rates:
                line.append((cell["rtt_ms"], rates[name]))
    if lines["sync"] and lines["sync"][0][0] == 0:
        lines["colocated"] = [(rtt_ms, lines["sync"][0][1]) for rtt_ms, _ in lines["off"]]
    return lines


def picture(run: dict[str, Any], file: Path) -> None:
    """Tokens/s against round trip, a panel per rule. Raises ConfigError without matplotlib."""
    require()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    nearest = min(cell["target_rtt_ms"] for cell in run["cells"])
    panels: dict[str, list[dict[str, Any]]] = {}
    for cell in run["cells"]:
        if cell["target_rtt_ms"] == nearest:
            panels.setdefault(cell["rule"], []).append(cell)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (1.5 + 4.6 * columns, 1.6 + 3.6 * rows)
    chart, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, sharex=True, layout="constrained")
    for axis, (rule, cells) in zip(axes.flat, panels.items()):
        draw_panel(axis, rule, cells)
    for axis in list(axes.flat)[len(panels) :]:
        axis.axis("off")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    chart.legend(handles, labels, loc="outside lower center", ncols=1 + columns, frameon=False, fontsize=9)
    chart.suptitle(f"{run['models']['target']}; round trip to the target {nearest:g} ms", fontsize=10)
    chart.savefig(file, dpi=150)
    pyplot.close(chart)


def draw_panel(axis: Any, rule: str, cells: list[dict[str, Any]]) -> None:
    for name, points in lines_of(cells).items():
        if points:
            axis.plot(*zip(*points), markersize=4, **STYLES[name])
    axis.set_title(rule, fontsize=10)
    axis.set_xscale("symlog", linthresh=RTT_LINEAR_MS)
    rtts_ms = sorted({cell["rtt_ms"] for cell in cells})
    is_near = [0 < before and after < LABEL_DISTANCE * before for before, after in zip([0.0, *rtts_ms], rtts_ms)]
    axis.set_xticks(rtts_ms, ["" if near else f"{rtt_ms:g}" for near, rtt_ms in zip(is_near, rtts_ms)])
    axis.minorticks_off()
    axis.set_xlabel("round trip coordinator to draft, ms")
    axis.set_ylabel("tokens/s, one stream")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)


if __name__ == "__main__":
    picture(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
