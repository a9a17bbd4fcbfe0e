"""From what stages report to ratios, and to the bars of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.bars import Bar, worst_of
from bench.gpu_session.worker import Row

# Goal and stretch of step and forward over the time in which weights and cache are read, 1 to 8 rows.
READ_RATIOS = {"8B": ((1.3, 1.15), (1.22, 1.12)), "1B": ((1.8, 1.4), (1.55, 1.3))}
PLANS_US = {(1, 1): 40.0, (32, 4): 150.0}
SAMPLED = "COUPLED, top-p 0.95"


def completed(row: Row, gb_per_s: float | None) -> Row:
    """Returns a row with what follows from it and the memory's speed: `limit_ms`, the time in which the bytes are read,
    and times over it."""
    row = dict(row)
    if "step_ms" in row and "forward_ms" in row:
        row["outside_ms"] = row["step_ms"] - row["forward_ms"]
    if "fill_us" in row:
        row["both_us"] = row["fill_us"] + row["send_us"]
    if gb_per_s and row.get("bytes"):
        limit_ms = row["bytes"] / gb_per_s / 1e6
        if "us" in row:
            row |= {"gb_per_s": row["bytes"] / row["us"] / 1e3, "over_read": row["us"] / limit_ms / 1e3}
        if "step_ms" in row:
            row |= {"limit_ms": limit_ms, "step_over": row["step_ms"] / limit_ms}
            row["forward_over"] = row["forward_ms"] / limit_ms
    return row


class Results:
    """The rows of a session, by stage."""

    def __init__(self, stages: Iterable[dict[str, Any]]):
        self._rows: dict[str, list[Row]] = {stage["stage"]: stage["results"] for stage in stages}
        speeds = self.rows("bandwidth")
        self.gb_per_s: float | None = speeds[0]["gb_per_s"] if speeds else None

    def rows(self, stage: str, **wanted: Any) -> list[Row]:
        """Returns the rows of a stage with these values, in order."""
        return [row for row in self._rows.get(stage, []) if all(row.get(name) == own for name, own in wanted.items())]

    def step(self, is_dependent: bool, model: str, rows: int, paths: int = 1, is_long: bool = False) -> Row | None:
        """Returns a step of one text by kernels."""
        its = {"dependent_launch": is_dependent, "model": model, "rows": rows, "paths": paths, "is_long": is_long}
        found = self.rows("steps", way="kernels", texts=1, **its)
        return found[0] if found else None

    def models(self) -> list[str]:
        """The models of the bars, and others that were measured."""
        return list(dict.fromkeys((*READ_RATIOS, *(row["model"] for row in self.rows("steps")))))


def bars_of(stage: str, results: Results) -> list[Bar]:
    """Returns the bars that a stage's rows are judged by."""
    return BARS[stage](results) if stage in BARS else []


def check_bar(claim: str, rows: Iterable[Row]) -> Bar:
    """The bar of checks that count `equal` of `rows`: none may be left. Shows those that are."""
    counts = {
        f"{row['model']} {row['check']} {row.get('width', row.get('weight', ''))}".strip(): row["rows"] - row["equal"]
        for row in rows
        if "equal" in row
    }
    wrong = {name: float(count) for name, count in counts.items() if count}
    return worst_of(claim, 0.0, wrong or ({f"all {len(counts)} checks": 0.0} if counts else {}), is_limit=True)


def step_bars(results: Results) -> list[Bar]:
    """The bars of whole steps, with dependent launch where it was measured: to the time of reading, and one shape of
    step against another."""
    bars = []
    for is_dependent, after in ((False, ""), (True, ", dependent launch")):
        if is_dependent and not results.rows("steps", dependent_launch=True):
            continue
        outside, wide, trees, longer = (dict[str, float]() for _ in range(4))
        for model in results.models():
            found = [row for rows in range(1, 9) if (row := results.step(is_dependent, model, rows))]
            for name, (goal, stretch) in zip(("step", "forward"), READ_RATIOS.get(model, READ_RATIOS["1B"])):
                values = {f"{row['rows']} rows": row[f"{name}_over"] for row in found if f"{name}_over" in row}
                bars.append(worst_of(f"{model}, 1 to 8 rows{after}: {name} / reading", goal, values, True, stretch))
            one, eight = (results.step(is_dependent, model, rows) for rows in (1, 8))
            tree = results.step(is_dependent, model, 8, paths=4)
            long = results.step(is_dependent, model, 1, is_long=True)
            if one:
                outside[model] = one["outside_ms"]
            if one and eight:
                wide[model] = eight["step_ms"] / one["step_ms"]
            if eight and tree:
                trees[model] = tree["step_ms"] / eight["step_ms"]
            if one and long and results.gb_per_s:
                reading_ms = (long["bytes"] - one["bytes"]) / results.gb_per_s / 1e6
                longer[model] = (long["step_ms"] - one["step_ms"]) / reading_ms
        bars += [
            worst_of(f"outside the forward, GREEDY, one stream{after}, ms", 0.15, outside, True, 0.1),
            worst_of(f"8 rows over 1{after}", 1.08, wide, True, 1.04),
            worst_of(f"tree of 8 on 4 paths over a chain{after}", 1.08, trees, True, 1.04),
            worst_of(f"8,192 tokens{after}: added time / reading the added cache", 1.8, longer, True, 1.3),
        ]
    return [*bars, check_bar("replays with dependent launch that differ", results.rows("steps"))]


def host_bars(results: Results) -> list[Bar]:
    """Plans, and what a sampled rule adds."""
    bars = []
    for (texts, rows), bound in PLANS_US.items():
        found = results.rows("host", texts=texts, rows=rows)
        values = {row["way"]: row["both_us"] for row in found}
        bars.append(worst_of(f"fill and send, {texts} x {rows} rows, us", bound, values, True))
    greedy = {row["model"]: row["step_ms"] for row in results.rows("host", rule="GREEDY")}
    added = {row["model"]: row["step_ms"] - greedy[row["model"]] for row in results.rows("host", rule=SAMPLED)}
    return [*bars, worst_of(f"{SAMPLED}, one row, over GREEDY, ms", 0.3, added, True, 0.15)]


def peer_bars(results: Results) -> list[Bar]:
    """Our step over the peer's, without dependent launch."""
    values = {}
    for row in results.rows("peer"):
        if own := results.step(False, row["model"], row["rows"]):
            values[f"{row['model']}, {row['rows']} rows"] = own["step_ms"] / row["step_ms"]
    return [worst_of("step / transformers, static cache, compiled", 1.0, values, True, 0.85)]


def text_bars(results: Results) -> list[Bar]:
    """Texts with speculation and without."""
    values = {f"{row['tokens']} tokens": float(row["differing_prompts"]) for row in results.rows("sameness")}
    return [worst_of("texts that differ with speculation, bits of log-probabilities too", 0.0, values, True)]


BARS: dict[str, Callable[[Results], list[Bar]]] = {
    "bits": lambda results: [check_bar("rows with other bits in another step", results.rows("bits"))],
    "steps": step_bars,
    "host": host_bars,
    "sameness": text_bars,
    "peer": peer_bars,
}


def told(row: Row) -> str:
    """A row in one line."""
    return ", ".join(f"{name} {number(value)}" for name, value in row.items() if value not in ("", [], None))


def number(value: Any) -> str:
    """A value with the digits that mean something."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "; ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
