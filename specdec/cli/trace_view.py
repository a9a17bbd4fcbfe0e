"""A trace on the terminal: its events in words, a waterfall of its spans, a table of its times; two side by side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from specdec.traces.facts import Facts, Part, facts_of
from specdec.traces.reader import Line, ReadSpan, TraceTree

FOLD_FROM = 3  # spans of one name below one line share a line, without --all
BAR_WIDTH_MIN, BAR_WIDTH_MAX = 8, 80
HEADINGS = ("span", "service", "start ms", "ms", "p99")
SHARE_BAR_WIDTH = 10
COLORS = {"coordinator": "cyan", "target": "green", "draft": "yellow"}
EIGHTHS = "▏▎▍▌▋▊▉█"


def show(tree: TraceTree, console: Console, is_all: bool = False) -> None:
    """Prints the events, the waterfall and the table."""
    facts = facts_of(tree)
    console.print(title(facts))
    console.print(happenings(facts))
    console.print(largest_sentence(facts), "", sep="\n", highlight=False)
    for root in tree.roots:
        console.print(waterfall(tree, root, console.width, is_all))
    console.print(where_time_went(facts.parts))
    for sentence in remarks(facts):
        console.print(sentence, style="dim")


def title(facts: Facts) -> str:
    """The generation in one line."""
    how = f"failed: {facts.error}" if facts.error else f"{facts.output_tokens} tokens in {facts.rounds} rounds"
    return f"{facts.model}: {how}, acceptance {facts.acceptance:.2f}, {facts.total_ms:.1f} ms"


def happenings(facts: Facts) -> Table:
    """Returns what happened, one line or more each behind its time."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", min_width=10)
    for happening in facts.happened:
        table.add_row(f"{happening.at_ms / 1000:.2f} s", happening.sentence)
    return table


def largest_sentence(facts: Facts) -> str:
    """The largest part of the time, in words."""
    return f"Largest part: {facts.largest.name}, {facts.largest.share:.0%} ({facts.largest.meaning})."


def waterfall(tree: TraceTree, root: ReadSpan, width: int, is_all: bool) -> Table:
    """Returns one line per span, or per FOLD_FROM and more of one name: name below its parent, service, start, median
    and 99th percentile of the durations, and a bar. Nothing is cut at 80 columns."""
    total_ms = max(root.duration_ms, 1e-9)
    lines = list(tree.lines(root, math.inf if is_all else FOLD_FROM))
    rows = [cells(line) for line in lines]
    columns_width = sum(1 + max(map(len, column)) for column in zip(HEADINGS, *rows))
    bar_width = min(BAR_WIDTH_MAX, max(BAR_WIDTH_MIN, width - columns_width - 1))
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in HEADINGS:
        table.add_column(name, justify="left" if name in ("span", "service") else "right", no_wrap=True)
    table.add_column(no_wrap=True)
    for line, row in zip(lines, rows):
        spans = zip(line.starts_ms, line.spans)
        bar = bar_of([(start_ms / total_ms, span.duration_ms / total_ms) for start_ms, span in spans], bar_width)
        table.add_row(*row, Text(bar, row[0].style))
    if not is_all:
        table.caption, table.caption_justify = "×: spans on one line, with their median; --all shows each", "left"
    return table


def cells(line: Line) -> tuple[Text, Text, str, str, str]:
    """Returns one row of the waterfall, without its bar."""
    service = line.span.service.removeprefix("specdec-")
    color = "red" if any(span.is_failed for span in line.spans) else COLORS.get(service, "white")
    count = len(line.spans)
    name = Text(" " * line.depth + line.span.name + (f" ×{count}" if count > 1 else ""), style=color)
    durations_ms = sorted(span.duration_ms for span in line.spans)
    p99 = number(durations_ms[math.ceil(0.99 * count) - 1]) if count > 1 else ""
    return name, Text(service, style="dim"), number(line.start_ms), number(statistics.median(durations_ms)), p99


def number(ms: float) -> str:
    """Milliseconds in seven characters, if they are below 100 s."""
    return f"{ms:.2f}" if abs(ms) < 1000 else f"{ms:.1f}"


def bar_of(parts: Iterable[tuple[float, float]], width: int) -> str:
    """Returns the bars of (start, length), as shares of `width`; the end of each in eighths of a character; none is
    empty."""
    drawn = [" "] * width
    for start_share, share in parts:
        first = min(width - 1, max(0, int(start_share * width)))
        whole, rest = divmod(max(1, round(min(share, 1.0) * width * 8)), 8)
        for index, sign in enumerate(EIGHTHS[-1] * whole + (EIGHTHS[rest - 1] if rest else ""), first):
            if index < width:
                drawn[index] = max(drawn[index], sign, key=f" {EIGHTHS}".index)
    return "".join(drawn).rstrip()


def where_time_went(parts: Sequence[Part]) -> Table:
    """Returns the kinds of time with their shares of the call."""
    table = Table(box=None, padding=(0, 1, 0, 0), title="Where the time went", title_justify="left")
    columns: tuple[tuple[str, JustifyMethod], ...] = (("", "left"), ("ms", "right"), ("share", "right"))
    for name, justify in (*columns, ("", "left"), ("", "left")):
        table.add_column(name, justify=justify, no_wrap=True)
    for part in parts:
        bar = bar_of([(0.0, part.share)], SHARE_BAR_WIDTH) if part.share > 0 else ""
        table.add_row(part.name, f"{part.ms:.1f}", f"{part.share:.1%}", bar, Text(part.meaning, style="dim"))
    return table


def remarks(facts: Facts) -> list[str]:
    """Returns notes on drafting time and clock offsets."""
    sentences = [f"Beside the rounds the draft worked {facts.drafting_ms:.1f} ms."]
    for service, offset_ms in sorted(facts.clock_offsets_ms.items()):
        sentences.append(f"The {service}'s clock is {offset_ms:+.2f} ms from the coordinator's; its spans are moved.")
    return sentences


def side_by_side(first: Facts, second: Facts) -> Table:
    """Returns two generations in two columns, and the second's number over the first's."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column()
    for name in (f"{first.trace_id[:8]}…", f"{second.trace_id[:8]}…", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [
        ("total ms", first.total_ms, second.total_ms, "{:.1f}"),
        ("tokens", first.output_tokens, second.output_tokens, "{:.0f}"),
        ("tokens/s", first.tokens_per_s, second.tokens_per_s, "{:.1f}"),
        ("rounds", first.rounds, second.rounds, "{:.0f}"),
        ("acceptance", first.acceptance, second.acceptance, "{:.2f}"),
        *((f"{one.name} ms", one.ms, two.ms, "{:.1f}") for one, two in zip(first.parts, second.parts)),
        *(
            (f"{one.name} share, %", 100 * one.share, 100 * two.share, "{:.1f}")
            for one, two in zip(first.parts, second.parts)
        ),
    ]
    for name, one, two, form in rows:
        table.add_row(name, form.format(one), form.format(two), f"{two / one:.2f}" if one else "")
    return table


def listing(found: Sequence[Facts]) -> Group:
    """Returns one line per generation, and below it what happened."""
    form = "{:<32} {:>10} {:>6} {:>10}  {}"
    lines: list[RenderableType] = [Text(form.format("trace id", "ms", "tokens", "acceptance", "largest part"))]
    for facts in found:
        numbers = f"{facts.total_ms:.0f}", facts.output_tokens, f"{facts.acceptance:.2f}"
        largest = f"{facts.largest.name} {facts.largest.share:.0%}"
        lines.append(Text(form.format(facts.trace_id, *numbers, largest), "red" if facts.error else ""))
        lines += [happenings(facts)] if facts.happened else []
    return Group(*lines)
