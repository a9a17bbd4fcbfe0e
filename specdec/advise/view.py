"""Advice on the terminal and as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from specdec.advise.forecast import LENGTHS, Estimate, Times
from specdec.advise.report import Advice, Cell
from specdec.errors import ConfigError

RTTS_MS = (0, 1, 2, 5, 10, 20, 30, 50, 75, 100)


def show(console: Console, advice: Advice, rtt_s: float) -> None:
    """Prints the tables of one draft or head, and a sentence that recommends."""
    console.rule(advice.draft, align="left")
    steps = f"{1e3 * advice.draft_step_s:.2f} ms, a step of the target {1e3 * advice.target_step_s:.2f} ms"
    of_it = "pass of the head" if advice.is_head else "step of the draft"
    console.print(f"{advice.weight_bytes / 1e6:.0f} MB of weights; a {of_it} {steps}")
    console.print(acceptance_table(advice.cells))
    if (cosine := advice.cells[-1].cosine) is not None:
        console.print(f"cosine of the final hidden states {of(cosine)}: a diagnosis, no acceptance follows from it")
    if advice.is_head:
        console.print(place_table(advice.cells))
    console.print(length_table(advice.cells))
    console.print(plan_table(advice))
    console.print(sentence(advice, rtt_s))


def of(estimate: Estimate, digits: int = 2) -> str:
    """A value with half the width of its interval."""
    return f"{estimate.value:.{digits}f} ±{(estimate.high - estimate.low) / 2:.{digits}f}"


def narrow(estimate: Estimate) -> str:
    """Half the width of an interval, without the zero before the point."""
    return f"±{(estimate.high - estimate.low) / 2:.2f}".replace("±0", "±")


def acceptance_table(cells: Sequence[Cell]) -> Table:
    """Two lines for each class and temperature: values, and half the widths of their intervals."""
    title = "acceptance of a draft token (95 %), and how the distributions differ"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("prompts", "T", "rule", "accepted", "TV", "tenth", "KL", "entropy", "ECE", "reach"):
        table.add_column(name, justify="left" if name in ("prompts", "rule") else "right")
    for cell in cells:
        told = {rule: f"{value.value:.2f} {narrow(value)}" for rule, value in cell.acceptance.items()}
        rules = [*map(list, told.items()), ["", ""]]
        means = cell.divergence, cell.entropy, cell.calibration_error
        values = [f"{mean.value:.2f}" for mean in (cell.variation, *means)]
        tenth = cell.variation_in_tenth
        values.insert(1, f"{tenth.value:.0%}")
        widths = [*map(narrow, (cell.variation, *means, cell.reachable))]
        widths.insert(1, f"±{(tenth.high - tenth.low) / 2:.0%}")
        table.add_row(cell.prompt_class, f"{cell.temperature:g}", *rules[0], *values, f"{cell.reachable.value:.2f}")
        table.add_row("", "", *rules[1], *widths)
    return table


def place_table(cells: Sequence[Cell]) -> Table:
    """Acceptance of a head's first, second, ... token, as `row_table`."""
    title = "acceptance of a chain's token j, those before it accepted (95 %)"
    return row_table(title, [(cell, cell.places) for cell in cells])


def length_table(cells: Sequence[Cell]) -> Table:
    """Tokens of a round by draft tokens, as `row_table`."""
    return row_table("tokens of a round with k draft tokens (95 %)", [(cell, cell.tokens) for cell in cells])


def row_table(title: str, rows: Sequence[tuple[Cell, dict[str, list[Estimate]]]]) -> Table:
    """Two lines for each class, temperature and rule: values for 1, 2, ... draft tokens, and half the widths of their
    intervals. First the rule that reproduces the texts, another by its name."""
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("prompts", "T", *map(str, LENGTHS)):
        table.add_column(name, justify="left" if name == "prompts" else "right")
    for cell, by_rule in rows:
        for number, (rule, values) in enumerate(by_rule.items()):
            named = [rule, ""] if number else [cell.prompt_class, f"{cell.temperature:g}"]
            table.add_row(*named, *(f"{one.value:.2f}" for one in values))
            table.add_row("", "", *map(narrow, values), style="dim")
    return table


def plan_table(advice: Advice) -> Table:
    """A line for each number of draft tokens."""
    table = Table(title="rounds that wait for k draft tokens; trees and streaming are not predicted")
    for name in ("k", "tokens a round", "tokens/s", "of plain", "accepted a draft s"):
        table.add_column(name, justify="right")
    has_price = advice.plain_price > 0 or advice.plans[0].price > 0
    if has_price:
        table.add_column("price of 1M tokens", justify="right")
    plain = ["0", "1", f"{advice.plain_rate:.1f}", "1", ""]
    table.add_row(*plain, *([f"{advice.plain_price:.2f}"] if has_price else []))
    for plan in advice.plans:
        table.add_row(
            str(plan.length),
            of(plan.tokens),
            of(plan.rate, 1),
            of(plan.ratio),
            f"{plan.accepted_per_draft_s:.0f}",
            *([f"{plan.price:.2f}"] if has_price else []),
            style="bold" if plan.length == advice.best else "",
        )
    return table


def sentence(advice: Advice, rtt_s: float) -> str:
    """The recommendation and its limits."""
    plan, ends = advice.best_plan, advice.pays_until
    limits_s = {"pass": ends.draft_step_s}
    if ends.rtt_s is not None:
        limits_s = {"round trip": ends.rtt_s, "draft step": ends.draft_step_s}
    if plan is None:
        at = "" if advice.is_head else f" at a round trip of {1e3 * rtt_s:g} ms"
        reached = [f"with a {name} below {1e3 * limit_s:.2f} ms" for name, limit_s in limits_s.items() if limit_s > 0]
        missed = [f"at any {name}" for name, limit_s in limits_s.items() if limit_s <= 0]
        return (
            f"Plain decoding is faster than any number of draft tokens{at}. "
            + (f"Drafting would pay {', or '.join(reached)}. " if reached else "")
            + f"It does not pay {', or '.join([*missed, 'with one session'])}."
        )
    sessions = "1 session" if ends.batch == 1 else f"{ends.batch} sessions"
    digits = {"round trip": 0, "draft step": 1, "pass": 1}
    limits = ", a ".join(f"{name} of {1e3 * limit_s:.{digits[name]}f} ms" for name, limit_s in limits_s.items())
    return (
        f"Recommended: {plan.length} draft tokens a round, {plan.ratio.value:.2f} times plain decoding. Drafting pays "
        f"up to a {limits}, a batch of {sessions}. --policy auto finds such a plan by itself."
    )


def sweep_table(advices: Sequence[Advice]) -> Table:
    """A line for each draft or head; the fastest in bold."""
    table = Table(title="all drafts and heads, each with its best number of draft tokens")
    for name in ("draft", "MB", "step ms", "k", "tokens a round", "tokens/s", "of plain"):
        is_name = name == "draft"
        table.add_column(name, justify="left" if is_name else "right", overflow="fold" if is_name else "ellipsis")
    fastest = max(rate_of(advice) for advice in advices)
    for advice in advices:
        plan = advice.best_plan
        told = [str(plan.length), of(plan.tokens), of(plan.rate, 1), of(plan.ratio)] if plan else ["0", "1", "", "1"]
        table.add_row(
            advice.draft,
            f"{advice.weight_bytes / 1e6:.0f}",
            f"{1e3 * advice.draft_step_s:.2f}",
            *told,
            style="bold" if rate_of(advice) == fastest else "",
        )
    return table


def trip_table(advices: Sequence[Advice], times: Sequence[Times]) -> Table:
    """A line for each draft or head: tokens/s of its best number of draft tokens, by round trip."""
    title = "tokens/s by round trip to the draft, ms; a head on the target has none"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("draft", overflow="fold")
    for rtt_ms in RTTS_MS:
        table.add_column(str(rtt_ms), justify="right")
    for advice, own in zip(advices, times):
        table.add_row(advice.draft, *(f"{rate:.1f}" for rate in rates_by_trip(advice, own)))
    return table


def rates_by_trip(advice: Advice, times: Times) -> list[float]:
    """Tokens per second with the best number of draft tokens, by round trip."""
    return [
        max(own.rate(advice.plans[length - 1].tokens.value, length) for length in LENGTHS)
        for own in (replace(times, rtt=None if times.rtt is None else rtt_ms / 1e3) for rtt_ms in RTTS_MS)
    ]


def rate_of(advice: Advice) -> float:
    """Tokens per second of the recommended plan."""
    return advice.best_plan.rate.value if advice.best_plan else advice.plain_rate


def check_plot(file: Path) -> None:
    """Raises ConfigError if this picture could not be written: without matplotlib or the folder."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'specdec[bench]'")
    if not file.parent.is_dir():
        raise ConfigError(f"--plot is {file}; there is no folder {file.parent}")


def picture_of(advices: Sequence[Advice], times: Sequence[Times]) -> Any:
    """Returns the picture, of matplotlib: acceptance of the first draft by class, temperature and rule, a place in the
    colour of its first rule; and tokens/s of all drafts by round trip."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = advices[0].cells
    classes = list(dict.fromkeys(cell.prompt_class for cell in cells))
    temperatures = sorted({cell.temperature for cell in cells})
    known = {(cell.prompt_class, cell.temperature): [own.value for own in cell.acceptance.values()] for cell in cells}
    rules = {cell.temperature: " / ".join(cell.acceptance) for cell in cells}
    grid = [[known.get((name, temperature), [float("nan")]) for temperature in temperatures] for name in classes]
    picture, (left, right) = pyplot.subplots(1, 2, figsize=(12, 1.5 + 0.6 * max(4, len(classes))), layout="constrained")
    left.imshow([[values[0] for values in row] for row in grid], vmin=0, vmax=1, cmap="viridis", aspect="auto")
    columns = [f"{temperature:g}\n{rules[temperature]}" for temperature in temperatures]
    left.set_xticks(range(len(temperatures)), columns)
    left.set_yticks(range(len(classes)), classes)
    for row, places in enumerate(grid):
        for column, values in enumerate(places):
            told, color = " / ".join(f"{value:.2f}" for value in values), "white" if values[0] < 0.6 else "black"
            left.text(column, row, told, ha="center", va="center", color=color)
    left.set(xlabel="temperature and rule", title=f"acceptance, {advices[0].draft}")
    for advice, own in zip(advices, times):
        right.plot(RTTS_MS, rates_by_trip(advice, own), marker="o", label=advice.draft)
    right.axhline(advices[0].plain_rate, color="grey", linestyle="--", label="plain decoding")
    right.set(xlabel="round trip to the draft, ms", ylabel="tokens/s, best k", ylim=(0, None), title="forecast")
    right.legend()
    return picture
