"""The tables of the pipeline benchmark: tokens/s by round trip, how speculation went, the simulator beside it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from bench.pipeline.measurements import Measurements
from bench.pipeline.simulated import CEILING, Steps
from bench.pipeline.sweep import Cell
from bench.pipeline.variants import AUTO, OFF, TREE, Variant


def rate_table(rule: str, cells: Sequence[Cell], variants: Sequence[Variant]) -> Table:
    """One line per round trip: tokens/s of each variant, and what the goals ask of them."""
    table = Table(title=f"tokens/s, {rule}; round trip to the target {cells[0].target_rtt_ms:g} ms")
    colocated = colocated_gain(cells)
    headings = (
        "auto/off [95 %]",
        "best sync",
        "tree/best sync",
        "auto/best sync",
        "auto/best fixed",
        "tree/co-located",
        "auto/co-located",
    )
    for name in ("RTT ms", *(variant.name for variant in variants), *headings):
        table.add_column(name, justify="right")
    for cell in cells:
        own = cell.measurements
        rates = [f"{own[variant.name].tokens_per_s:.0f}" if variant.name in own else "" for variant in variants]
        table.add_row(f"{cell.rtt_ms:g}", *rates, *comparisons(cell, colocated))
    return table


def colocated_gain(cells: Sequence[Cell]) -> float | None:
    """Best synchronous rounds with the draft beside the coordinator, over off in that same cell; None unmeasured."""
    nearest = min(cells, key=lambda cell: cell.rtt_ms)
    best = nearest.best_synchronous()
    return nearest.gain(best, OFF.name) if best and nearest.rtt_ms == 0 else None


def comparisons(cell: Cell, colocated: float | None) -> list[str]:
    """The last columns. Co-located is compared through each cell's own off, so that a slower hour does not count."""
    best = cell.best_synchronous()
    shown = [name if name in cell.comparable else None for name in (TREE.name, AUTO.name)]
    against_best = [f"{cell.gain(name, best):.2f}" if name and best else "" for name in shown]
    against_near = [f"{cell.gain(name, OFF.name) / colocated:.2f}" if name and colocated else "" for name in shown]
    if cell.ratio is None:
        ratio = ""
    elif cell.first_ratio is None:
        ratio = f"{cell.ratio.median:.2f}"
    else:
        ratio = f"{cell.first_ratio.median:.2f}; again {cell.ratio}"
    against_fixed = "" if cell.over_best_fixed is None else f"{cell.over_best_fixed.median:.2f}"
    return [ratio, best or "", *against_best, against_fixed, *against_near]


def speculation_table(cells: Sequence[Cell], variants: Sequence[Variant]) -> Table:
    """One line per cell and streamed variant: acceptance, hits, work, bytes, and what the policy predicted."""
    table = Table(title="how speculation went; ms a round; off's forward is a target step while the draft rests")
    numbers = ("accept", "length", "hits", "nodes/tok", "B/tok", "rows", "off rounds", "predicted/observed")
    parts = ("forward", "sampler", "link", "wait")
    for name in ("rule", "RTT ms", "variant", *numbers, *parts):
        table.add_column(name, justify="left" if name in ("rule", "variant") else "right")
    for cell in cells:
        own = cell.measurements
        for variant in variants:
            if variant.name in own:
                table.add_row(cell.rule, f"{cell.rtt_ms:g}", variant.name, *speculation_columns(own[variant.name]))
        table.add_section()
    return table


def speculation_columns(own: Measurements) -> list[str]:
    predicted = own.predicted_tokens_per_s / own.tokens_per_s
    return [
        f"{own.acceptance:.2f}",
        f"{own.mean_length:.2f}",
        f"{own.hit_rate:.2f}",
        f"{own.nodes_per_token:.1f}",
        f"{own.draft_bytes_per_token:.0f}",
        f"{own.rows:.1f}",
        f"{own.rounds_off:.2f}",
        f"{predicted:.2f}" if predicted else "",
        *(f"{value:.2f}" for value in (own.forward_ms, own.sampling_ms, own.link_ms, own.wait_ms)),
    ]


def simulator_table(cells: Sequence[Cell], simulated: Sequence[dict[str, float]], variants: Sequence[Variant]) -> Table:
    """One line per cell: observed over simulated, and auto over the best plan the simulator finds."""
    table = Table(title="observed / simulated with measured steps, acceptance and overhead")
    names = [variant.name for variant in variants if variant.draft_length]
    for name in ("rule", "RTT ms", *names, "ceiling tok/s", "auto/ceiling"):
        table.add_column(name, justify="left" if name == "rule" else "right")
    for cell, rates in zip(cells, simulated, strict=True):
        own = cell.measurements
        ratios = [f"{own[name].tokens_per_s / rates[name]:.2f}" if name in rates else "" for name in names]
        reached = f"{own[AUTO.name].tokens_per_s / rates[CEILING]:.2f}" if AUTO.name in own else ""
        table.add_row(cell.rule, f"{cell.rtt_ms:g}", *ratios, f"{rates[CEILING]:.0f}", reached)
    return table


def step_table(steps: Steps) -> Table:
    """Milliseconds of steps with nothing else running."""
    table = Table(title="a step with nothing else running, ms: the target's by rows, the draft's by leaves")
    lines = {"target, forward": steps.target_ms, "draft, forward": steps.draft_forward_ms}
    lines |= {f"draft, in its service, {rule}": own for rule, own in steps.draft_ms.items()}
    counts = sorted({count for own in lines.values() for count in own})
    for name in ("", *map(str, counts)):
        table.add_column(name, justify="right" if name else "left")
    for name, own in lines.items():
        table.add_row(name, *(f"{own[count]:.2f}" if count in own else "" for count in counts))
    return table


def share_table(shares: dict[str, float]) -> Table:
    """CPU share per process over the whole sweep."""
    table = Table(title="CPU, share of one core over the sweep")
    for name in shares:
        table.add_column(name, justify="right")
    table.add_row(*(f"{share:.1%}" for share in shares.values()))
    return table
