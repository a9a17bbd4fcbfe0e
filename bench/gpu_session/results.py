"""From what stages report to ratios, and to the bars of a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

    def steps(self, is_dependent: bool, **wanted: Any) -> list[Row]:
        """Returns steps by kernels, chains of one text unless said otherwise."""
        own = {"texts": 1, "paths": 1} | wanted
        rows = self.rows("steps", way="kernels", dependent_launch=is_dependent, **own)
        shortest = min((row["context"] for row in rows), default=0)
        return [row for row in rows if "context" in wanted or row["context"] == shortest]

    def models(self) -> list[str]:
        """The models of the bars, and others that were measured."""
        return [
            *READ_RATIOS,
            *dict.fromkeys(row["model"] for row in self.rows("steps") if row["model"] not in READ_RATIOS),
        ]


def bars_of(stage: str, results: Results) -> list[Bar]:
    """Returns the bars that a stage's rows are judged by."""
    return BARS[stage](results) if stage in BARS else []


def bits_bars(results: Results) -> list[Bar]:
    """No row may have other bits in another step."""
    checked = [row for row in results.rows("bits") if "check" in row and "rows" in row]
    differing = {f"{row['model']} {row['check']} {row.get('width', '')}": row["rows"] - row["equal"] for row in checked}
    return [worst_of("rows with other bits in another step", 0.0, only_wrong(differing), is_limit=True)]


def only_wrong(counts: dict[str, int]) -> dict[str, float]:
    """Counts that are not 0, or one 0 for all."""
    wrong = {name: float(count) for name, count in counts.items() if count}
    return wrong or ({f"all {len(counts)} checks": 0.0} if counts else {})


def step_bars(results: Results) -> list[Bar]:
    """The bars of whole steps, with dependent launch where it was measured."""
    bars = []
    for is_dependent in (False, True):
        if is_dependent and not results.steps(True):
            continue
        after = ", dependent launch" if is_dependent else ""
        for model in results.models():
            bars += read_bars(results, model, is_dependent, after)
        bars += shape_bars(results, is_dependent, after)
    return bars


def read_bars(results: Results, model: str, is_dependent: bool, after: str) -> list[Bar]:
    """Step and forward over the time of reading."""
    rows = [row for row in results.steps(is_dependent, model=model) if row["rows"] <= 8]
    bars = []
    for name, (goal, stretch) in zip(("step", "forward"), READ_RATIOS.get(model, READ_RATIOS["1B"])):
        values = {f"{row['rows']} rows": row[f"{name}_over"] for row in rows if f"{name}_over" in row}
        bars.append(worst_of(f"{model}, 1 to 8 rows{after}: {name} / reading", goal, values, True, stretch))
    return bars


def shape_bars(results: Results, is_dependent: bool, after: str) -> list[Bar]:
    """One shape of step against another."""
    outside, wide, trees, longer = ({} for _ in range(4))
    for model in results.models():
        one, eight = (next(iter(results.steps(is_dependent, model=model, rows=rows)), None) for rows in (1, 8))
        tree = next(iter(results.steps(is_dependent, model=model, rows=8, paths=4)), None)
        if one:
            outside[model] = one["outside_ms"]
            for row in results.rows(
                "steps", way="kernels", dependent_launch=is_dependent, model=model, texts=1, rows=1
            ):
                if row["context"] > one["context"] and results.gb_per_s:
                    limit_ms = (row["bytes"] - one["bytes"]) / results.gb_per_s / 1e6
                    longer[model] = (row["step_ms"] - one["step_ms"]) / limit_ms
        if one and eight:
            wide[model] = eight["step_ms"] / one["step_ms"]
        if eight and tree:
            trees[model] = tree["step_ms"] / eight["step_ms"]
    return [
        worst_of(f"outside the forward, GREEDY, one stream{after}, ms", 0.15, outside, True, 0.1),
        worst_of(f"8 rows over 1{after}", 1.08, wide, True, 1.04),
        worst_of(f"tree of 8 on 4 paths over a chain{after}", 1.08, trees, True, 1.04),
        worst_of(f"8,192 tokens{after}: added time / reading the added cache", 1.8, longer, True, 1.3),
    ]


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
        for own in results.steps(False, model=row["model"], rows=row["rows"]):
            values[f"{row['model']}, {row['rows']} rows"] = own["step_ms"] / row["step_ms"]
    return [worst_of("step / transformers, static cache, compiled", 1.0, values, True, 0.85)]


def text_bars(results: Results) -> list[Bar]:
    """Texts with speculation and without."""
    values = {f"{row['tokens']} tokens": float(row["differing_prompts"]) for row in results.rows("sameness")}
    return [worst_of("texts that differ with speculation, bits of log-probabilities too", 0.0, values, True)]


BARS = {
    "bits": bits_bars,
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
