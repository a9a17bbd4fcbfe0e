"""A trace on the terminal: a waterfall of its spans, and a table of its times."""

from __future__ import annotations

from collections import Counter

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from specdec.telemetry.trace_reader import Line, ReadSpan, TraceTree

LINES_OF_A_KIND_MAX = 12  # of one name below one parent, without --all
BAR_WIDTH_MIN, BAR_WIDTH_MAX = 20, 80
COLUMNS_WIDTH = 62  # of all columns except the bars
COLORS = {"coordinator": "cyan", "target": "green", "draft": "yellow"}
EIGHTHS = "▏▎▍▌▋▊▉█"


def show(tree: TraceTree, console: Console, is_all: bool = False) -> None:
    """Prints the waterfall and the table."""
    for root in tree.roots:
        console.print(waterfall(tree, root, console.width, is_all))
    console.print(where_time_went(tree))
    for sentence in remarks(tree):
        console.print(sentence, style="dim")


def waterfall(tree: TraceTree, root: ReadSpan, width: int, is_all: bool) -> Table:
    """Returns one line per span: name below its parent, service, start, duration, and a bar."""
    bar_width = min(BAR_WIDTH_MAX, max(BAR_WIDTH_MIN, width - COLUMNS_WIDTH))
    table = Table(box=None, padding=(0, 1), title=title(root), title_justify="left")
    for name in ("span", "service"):
        table.add_column(name, no_wrap=True)
    for name in ("start ms", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    total_ms = max(root.duration_ms, 1e-9)
    seen: Counter[tuple[str, str]] = Counter()
    hidden: Counter[str] = Counter()
    hidden_ids: set[str] = set()
    for line in tree.lines(root):
        span = line.span
        seen[span.parent_id, span.name] += 1
        too_many = seen[span.parent_id, span.name] > LINES_OF_A_KIND_MAX and not is_all
        if span.parent_id in hidden_ids or too_many:
            hidden_ids.add(span.span_id)
            hidden[span.name] += 1
            continue
        table.add_row(*cells(line, total_ms, bar_width))
    if hidden:
        table.add_row(Text(f"… and {sum(hidden.values())} more; --all shows them", style="dim"), "", "", "", "")
    return table


def title(root: ReadSpan) -> str:
    said = root.attributes
    tokens, rounds = said.get("gen_ai.usage.output_tokens", 0), said.get("specdec.rounds", 0)
    rate = said.get("specdec.draft_acceptance_rate", 0.0)
    model = said.get("gen_ai.request.model", "?")
    how = "failed: " + str(said.get("error.type", "?")) if root.is_failed else f"{tokens} tokens in {rounds} rounds"
    return f"{model}: {how}, acceptance {rate:.2f}, {root.duration_ms:.1f} ms"


def cells(line: Line, total_ms: float, bar_width: int) -> tuple[Text, Text, str, str, Text]:
    """Returns one row of the waterfall."""
    span = line.span
    service = span.service.removeprefix("specdec-")
    color = "red" if span.is_failed else COLORS.get(service, "white")
    name = Text("  " * line.depth + span.name, style=color)
    bar = bar_of(line.start_ms / total_ms, span.duration_ms / total_ms, bar_width)
    return name, Text(service, style="dim"), f"{line.start_ms:.2f}", f"{span.duration_ms:.2f}", Text(bar, style=color)


def bar_of(start_share: float, share: float, width: int) -> str:
    """Returns a bar from `start_share` on, in eighths of a character; never empty."""
    first = min(width - 1, max(0, int(start_share * width)))
    eighths = max(1, round(min(share, 1.0) * width * 8))
    whole, rest = divmod(eighths, 8)
    bar = EIGHTHS[-1] * whole + (EIGHTHS[rest - 1] if rest else "")
    return " " * first + bar[: width - first]


def where_time_went(tree: TraceTree) -> Table:
    """Returns the kinds of time with their shares of the call."""
    table = Table(box=None, padding=(0, 1), title="Where the time went", title_justify="left")
    columns: tuple[tuple[str, JustifyMethod], ...] = (("", "left"), ("ms", "right"), ("share", "right"))
    for name, justify in (*columns, ("", "left"), ("", "left")):
        table.add_column(name, justify=justify, no_wrap=True)
    for name, spent_ms, share, meaning in tree.shares():
        bar = bar_of(0.0, share, BAR_WIDTH_MIN) if share > 0 else ""
        table.add_row(name, f"{spent_ms:.1f}", f"{share:.1%}", bar, Text(meaning, style="dim"))
    return table


def remarks(tree: TraceTree) -> list[str]:
    """Returns notes on drafting time and clock offsets."""
    sentences = [f"Beside the rounds the draft worked {tree.drafting_ms():.1f} ms in the steps recorded here."]
    for service, offset_ms in sorted(tree.clock_offsets_ms().items()):
        sentences.append(f"The {service}'s clock is {offset_ms:+.2f} ms from the coordinator's; its spans are moved.")
    return sentences
