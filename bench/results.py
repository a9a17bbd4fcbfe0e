"""What a benchmark measured: samples of variants in cells, medians and ratios of these, and the tables made from them.

Results are one JSON file for each benchmark. Tables on a terminal and in the pages are made from it, by the same code.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from rich.table import Table as RichTable

from specdec.client.ratios import Ratio as Ratio
from specdec.client.ratios import ratio_of as ratio_of
from specdec.client.ratios import shown as shown

COMMITTED = Path(__file__).resolve().parents[1] / "docs" / "results"  # the results that the pages show

Cell: TypeAlias = Mapping[str, str | float]  # what is held while variants take turns: {"rule": "GREEDY", "rtt_ms": 5}
Samples: TypeAlias = dict[str, dict[str, list[float]]]  # by variant and measure, a value for each turn


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


@dataclass(frozen=True, slots=True)
class Table:
    """A table of one benchmark. `name`: by which a page asks for it. `about`: one sentence that says what it means."""

    name: str
    about: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.columns, ["---", *("---:" for _ in self.columns[1:])], *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def rich(self) -> RichTable:
        """Returns it for a terminal."""
        table = RichTable(title=self.about)
        for place, name in enumerate(self.columns):
            table.add_column(name, justify="right" if place else "left")
        for row in self.rows:
            table.add_row(*(text.replace("**", "") for text in row))
        return table


@dataclass(slots=True)
class Results:
    """The results of one benchmark. `run`: its command, date, commit, machine and versions. `found`: samples by cell,
    in the order of their measurement. `notes`: what a benchmark tells beside its samples, as JSON has it."""

    run: dict[str, Any]
    found: list[tuple[Cell, Samples]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def cells(self, **wanted: str | float) -> list[Cell]:
        """Returns the cells that have these values."""
        return [cell for cell, _ in self.found if wanted.items() <= cell.items()]

    def samples(self, cell: Cell) -> Samples:
        """Returns the samples of a cell, none if it was not measured."""
        return next((samples for own, samples in self.found if own == cell), {})

    def add(self, cell: Cell, variant: str, values: Mapping[str, float]) -> None:
        """Adds what one turn of a variant measured."""
        samples = next((samples for own, samples in self.found if own == cell), None)
        if samples is None:
            samples = {}
            self.found.append((cell, samples))
        own = samples.setdefault(variant, {})
        for measure, value in values.items():
            own.setdefault(measure, []).append(value)

    def median(self, cell: Cell, variant: str, measure: str) -> float | None:
        """Returns the median over turns; None where it was not measured."""
        values = self.samples(cell).get(variant, {}).get(measure)
        return statistics.median(values) if values else None

    def ratio(self, cell: Cell, variant: str, over: str, measure: str, over_measure: str = "") -> Ratio | None:
        """Returns one variant's values over another's, turn by turn; None where one of them was not measured."""
        samples = self.samples(cell)
        ours = samples.get(variant, {}).get(measure)
        theirs = samples.get(over, {}).get(over_measure or measure)
        return ratio_of([own / other for own, other in zip(ours, theirs)]) if ours and theirs else None

    def over_best(self, cell: Cell, variant: str, others: Sequence[str], measure: str) -> Ratio | None:
        """Returns one variant's values over those of the best other, turn by turn; the best of odd turns is chosen on
        even ones, and the other way round, since the best in hindsight is so by luck too. None with fewer than two
        turns, or without others."""
        samples = {name: own[measure] for name, own in self.samples(cell).items() if own.get(measure)}
        ours, rivals = samples.get(variant, []), [other for other in others if other in samples]
        if len(ours) < 2 or not rivals:
            return None
        gains = {rival: [own / other for own, other in zip(ours, samples[rival])] for rival in rivals}
        compared: list[float] = []
        for first in (0, 1):
            best = min(rivals, key=lambda rival: statistics.median(gains[rival][1 - first :: 2]))
            compared += gains[best][first::2]
        return ratio_of(compared)

    def write(self, file: Path, **more: Any) -> None:
        """Writes them as JSON; `more` beside them."""
        parts = [
            f'"{name}": {json.dumps(own, indent=1)}'
            for name, own in {"run": self.run, "notes": self.notes, **more}.items()
        ]
        cells = [json.dumps({"cell": cell, "samples": _rounded(samples)}) for cell, samples in self.found]
        parts.append('"found": [\n' + ",\n".join(cells) + "\n]")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _rounded(samples: Samples) -> Samples:
    """Five digits of each: no clock here has more."""
    return {
        variant: {measure: [float(f"{value:.5g}") for value in values] for measure, values in own.items()}
        for variant, own in samples.items()
    }


def read_results(file: Path) -> Results:
    """Returns the results of a file. Raises OSError, and ValueError or KeyError for a file that is none."""
    written = json.loads(file.read_text(encoding="utf-8"))
    return Results(written["run"], [(own["cell"], own["samples"]) for own in written["found"]], written["notes"])
