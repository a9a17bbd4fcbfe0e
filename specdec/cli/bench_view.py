"""What `specdec bench` shows: progress, a table for each concurrency, whether speculation pays in a sentence, a
picture."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from specdec.client.load import OFF, ON, Measured
from specdec.client.ratios import PAIR_COUNT_MIN, Ratio
from specdec.client.serving_metrics import metrics_of, ratios_in_turns, same_texts
from specdec.terminal import make_console, print_text

# Sections of a table; each line's name, its metric, and how that is written.
SECTIONS = (
    (
        ("Successful requests", "completed", ",.0f"),
        ("Failed requests", "failed", ",.0f"),
        ("Benchmark duration (s)", "duration", ",.2f"),
        ("Total input tokens", "total_input_tokens", ",.0f"),
        ("Total generated tokens", "total_output_tokens", ",.0f"),
        ("Request throughput (req/s)", "request_throughput", ",.2f"),
        ("Output token throughput (tok/s)", "output_throughput", ",.2f"),
        ("Total token throughput (tok/s)", "total_token_throughput", ",.2f"),
    ),
    *(
        tuple(
            (f"{kind} {short} (ms)", f"{kind.lower()}_{short.lower()}_ms", ",.2f") for kind in ("Mean", "Median", "P99")
        )
        for short in ("TTFT", "TPOT", "ITL", "E2EL")
    ),
    (
        ("Draft tokens accepted (%)", "spec_decode_acceptance_rate", ".1%"),
        ("Acceptance length", "spec_decode_acceptance_length", ".2f"),
        ("Draft link bytes per token", "draft_link_bytes_per_token", ",.1f"),
    ),
)
TITLES = (
    "",
    "Time to first token (TTFT)",
    "Time per output token (TPOT)",
    "Inter-token latency (ITL)",
    "End-to-end latency (E2EL)",
    "Speculative decoding",
)
NAMES = {ON: "on", OFF: "off"}
COLORS = {ON: "#c0392b", OFF: "#555555"}
PANELS = (  # of the picture: title and metrics
    ("output tokens a second", ("output_throughput",)),
    ("time to first token, ms: median and p99", ("median_ttft_ms", "p99_ttft_ms")),
    ("time per output token, ms: median and p99", ("median_tpot_ms", "p99_tpot_ms")),
)


@contextmanager
def progress(request_count: int) -> Iterator[Callable[[str, int], None]]:
    """Shows a bar with the time left on a terminal's standard error; yields what takes a new description ("": the same)
    and the number of requests that ended."""
    console = make_console(is_for_errors=True)
    if not console.is_terminal:
        yield lambda description, count: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn()
    left = TextColumn("left"), TimeRemainingColumn()
    with Progress(*columns, *left, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("", total=request_count)

        def show(description: str, count: int) -> None:
            bar.update(task, description=description or None, advance=count)

        yield show


def report_of(ways: Sequence[str], rate: float, cells: Sequence[Measured]) -> dict[str, Any]:
    """Returns what was measured, as JSON has it: metrics by concurrency and way, ratios in turns, and the sentence."""
    found = []
    for cell in cells:
        blocks = {way: [block for block in cell.blocks if block.way == way] for way in ways}
        ratios = {name: asdict(ratio) for name, ratio in ratios_in_turns(cell.blocks).items()}
        found.append(
            {
                "max_concurrency": cell.concurrency or None,
                "request_rate": "inf" if rate == float("inf") else rate,
                "ways": {way: metrics_of(own) for way, own in blocks.items()},
                "ratios": ratios,
                "same_texts": list(same_texts(cell.blocks)),
            }
        )
    report = {"cells": found}
    return report | {"sentence": sentence_of(report)}


def print_report(report: Mapping[str, Any], is_cut_short: bool) -> None:
    """Prints tables and sentences."""
    console = make_console(has_highlights=False)
    for cell in report["cells"]:
        console.print(table_of(cell))
        same, count = cell["same_texts"]
        if count:
            print_text(f"{same} of {count} texts had the same tokens with speculation and without.\n")
    if is_cut_short:
        print_text("Interrupted: this is what was measured by then.")
    if report["sentence"]:
        print_text(report["sentence"])


def load_of(cell: Mapping[str, Any]) -> str:
    """Returns a measurement's load in words."""
    most, rate = cell["max_concurrency"], cell["request_rate"]
    parts = [f"{most} at once" if most else "", f"{rate:g} requests a second" if rate != "inf" else ""]
    return ", ".join(part for part in parts if part)


def table_of(cell: Mapping[str, Any]) -> Table:
    """Returns the table of one measurement: a column for each way, and one for their ratio if there are both."""
    table = Table(title=load_of(cell), title_justify="left")
    table.add_column("speculation")
    for way in cell["ways"]:
        table.add_column(NAMES[way], justify="right")
    if cell["ratios"]:
        table.add_column(f"on/off {interval_name(cell['ratios'])}", justify="right")
    for title, lines in zip(TITLES, SECTIONS, strict=True):
        table.add_section()
        shown = [(name, key, form) for name, key, form in lines if any(key in own for own in cell["ways"].values())]
        if title and shown:
            table.add_row(title, style="bold")
        for name, key, form in shown:
            values = [_written(own.get(key), form) for own in cell["ways"].values()]
            ratio = Ratio(**cell["ratios"][key]).short() if key in cell["ratios"] else ""
            table.add_row(name, *values, *([ratio] if cell["ratios"] else []))
    return table


def _written(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return format(value, form).removesuffix("%")


def interval_name(ratios: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns what the interval beside a ratio is."""
    count = max(own["pair_count"] for own in ratios.values())
    return "[95 %]" if count >= PAIR_COUNT_MIN else "[least, most]"


def sentence_of(report: Mapping[str, Any]) -> str:
    """Returns whether speculation pays, in one sentence; "" if only one way was measured. It pays where the interval of
    output tokens a second is above 1 or, where requests arrive at a rate, that of end-to-end latency is below 1."""
    loads: dict[str, list[str]] = {}
    counts, measure = set(), ""
    for cell in report["cells"]:
        at_rate = cell["request_rate"] != "inf"
        own = cell["ratios"].get("mean_e2el_ms" if at_rate else "output_throughput")
        if own is not None:
            ratio = Ratio(**own)
            loads.setdefault(verdict_of(ratio, at_rate), []).append(f"{load_of(cell)} ({ratio.short()})")
            counts.add(ratio.pair_count)
            measure = "end-to-end latency" if at_rate else "output tokens a second"
    if not loads:
        return ""
    parts = "; it ".join(f"{verdict} with {' and with '.join(own)}" for verdict, own in loads.items())
    turns = " to ".join(map(str, sorted({min(counts), max(counts)})))
    kind = "95 % interval" if min(counts) >= PAIR_COUNT_MIN else "the least and the most"
    return f"Speculation {parts}: {measure}, on / off, {kind} of {turns} turns."


def verdict_of(ratio: Ratio, is_time: bool) -> str:
    """Returns what an interval of on / off says; `is_time`: less is better."""
    if ratio.pair_count < PAIR_COUNT_MIN:
        return f"cannot be judged by fewer than {PAIR_COUNT_MIN} turns"
    above, below = (ratio.high < 1, ratio.low > 1) if is_time else (ratio.low > 1, ratio.high < 1)
    return "pays" if above else "costs time" if below else "makes no difference that can be told"


def draw(report: Mapping[str, Any], file: Path) -> None:
    """Draws bars of both ways by concurrency: throughput, time to first token, time per output token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (4.6 * len(PANELS), 4.0)
    drawn, axes = pyplot.subplots(1, len(PANELS), figsize=size, layout="constrained")
    cells = report["cells"]
    ways = list(cells[0]["ways"])
    width = 0.8 / len(ways)
    for axis, (title, names) in zip(axes, PANELS):
        for place, way in enumerate(ways):
            at = [number + (place - (len(ways) - 1) / 2) * width for number in range(len(cells))]
            for depth, name in enumerate(reversed(names)):
                heights = [cell["ways"][way].get(name, 0.0) for cell in cells]
                is_main = depth == len(names) - 1
                label = f"speculation {NAMES[way]}" if is_main and axis is axes[0] else None
                axis.bar(at, heights, width * 0.92, color=COLORS[way], alpha=1.0 if is_main else 0.3, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(cells)), [load_of(cell) for cell in cells])
        axis.spines[["top", "right"]].set_visible(False)
    drawn.legend(loc="outside lower center", ncols=len(ways), frameon=False)
    drawn.suptitle(textwrap.fill(report["sentence"], 150), fontsize=9)
    drawn.savefig(file, dpi=150)
    pyplot.close(drawn)
