"""The one runner of benchmarks: order of turns, results, tables and bars. The benchmark here measures nothing: its
values are made up, so that every number that follows is known."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import NAMES, pages, runner
from bench.bars import Bar
from bench.results import Cell, Results, Table, ratio_of, read_results, shown
from bench.runner import Contender, Prepared
from specdec.errors import ConfigError

CELLS: list[Cell] = [{"streams": 1}, {"streams": 8}]


class MadeUp:
    """Two variants, of which `fast` is 2, 3, 4 ... times as fast as `slow`, turn by turn."""

    name, about = "made_up", "made-up numbers"
    turns, quick_turns, minutes = 5, 2, 0.1

    def __init__(self) -> None:
        self.asked: list[tuple[float | str, str, int]] = []

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--factor", type=float, default=1.0)

    def cells(self, asked: argparse.Namespace) -> Sequence[Cell]:
        return CELLS[:1] if asked.quick else CELLS

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
            def slow(turn: int) -> dict[str, float]:
                self.asked.append((cell["streams"], "slow", turn))
                return {"tokens_per_s": 10.0}

            def fast(turn: int) -> dict[str, float]:
                self.asked.append((cell["streams"], "fast", turn))
                return {"tokens_per_s": 10.0 * (turn + 1) * asked.factor}

            return {"slow": slow, "fast": fast}

        yield contenders

    def tables(self, results: Results) -> Sequence[Table]:
        rows = []
        for cell in results.cells():
            ratio = results.ratio(cell, "fast", "slow", "tokens_per_s")
            assert ratio is not None
            rows.append([str(cell["streams"]), shown(ratio.median, 5)])
        return [Table("speed", "fast over slow", ["streams", "ratio"], rows)]

    def bars(self, results: Results) -> Sequence[Bar]:
        ratio = results.ratio(CELLS[0], "fast", "slow", "tokens_per_s")
        missing = results.ratio({"streams": 64}, "fast", "slow", "tokens_per_s")
        return [Bar("fast / slow", 4.0, ratio and ratio.median), Bar("of 64 streams", 1.0, missing and missing.median)]


def test_variants_take_turns_and_the_first_is_dropped(tmp_path: Path) -> None:
    """Claim: in every cell all variants are measured turn by turn, in alternating order, and the turn that warms up is
    in no result. Conclusive: every call is recorded, and the results are read back from the file."""
    made_up = MadeUp()
    assert runner.main(made_up, ["--out", str(tmp_path), "--turns", "3"]) == 0
    expected = [
        (cell["streams"], variant, turn)
        for cell in CELLS
        for turn in range(4)
        for variant in (("slow", "fast") if turn % 2 else ("fast", "slow"))
    ]
    assert made_up.asked == expected
    results = read_results(tmp_path / "made_up.json")
    assert results.samples(CELLS[1]) == {"fast": {"tokens_per_s": [20, 30, 40]}, "slow": {"tokens_per_s": [10] * 3}}
    assert results.ratio(CELLS[0], "fast", "slow", "tokens_per_s") == ratio_of([2, 3, 4])
    assert results.median({"streams": 64}, "fast", "tokens_per_s") is None


@pytest.mark.parametrize(("factor", "code"), [("2", 0), ("1", 1)])
def test_a_missed_bar_is_the_exit_code(factor: str, code: int, tmp_path: Path) -> None:
    """Claim: with --check the exit code is 1 where a bar is missed, and a bar that was not measured is not missed.
    Conclusive: the same benchmark on both sides of its bar (median of 2 and 3 times: 2.5, or 5 with factor 2)."""
    flags = ["--out", str(tmp_path), "--quick", "--check", "--factor", factor]
    assert runner.main(MadeUp(), flags) == code
    written = json.loads((tmp_path / "made_up.json").read_text("utf-8"))
    assert [bar["reached"] for bar in written["bars"]] == [2.5 * float(factor), None]
    assert len(written["found"]) == 1, "--quick has fewer cells"


def test_a_table_of_a_page_is_that_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: between its marks a page gets the benchmark's table with command, date and machine, whatever stood there;
    filled again it does not change; a table or results that do not exist are refused. Conclusive: a digit changed by
    hand is seen and mended."""
    monkeypatch.setattr(runner, "COMMITTED", tmp_path)
    monkeypatch.setattr(pages, "load", lambda name: MadeUp())
    page = "# Speed\n\n<!-- table made_up/speed -->\nold\n<!-- end -->\nmore\n"
    with pytest.raises(ConfigError, match="there is no docs/results/made_up.json"):
        pages.filled(page)
    runner.main(MadeUp(), ["--commit-results", "--turns", "5"])
    filled = pages.filled(page)
    assert "| 1 | **4.00** |\n| 8 | **4.00** |" in filled and "`python -m bench.made_up --turns 5`, 20" in filled
    assert filled.startswith("# Speed\n") and filled.endswith("\nmore\n") and "old" not in filled
    assert pages.filled(filled) == filled == pages.filled(filled.replace("4.00", "9.00"))
    with pytest.raises(ConfigError, match="made_up has no table 'time'; it has speed"):
        pages.filled(page.replace("/speed", "/time"))


def test_pages_name_benchmarks_that_exist() -> None:
    """Claim: every `python -m bench.NAME` of the pages is a benchmark, or one of the tools beside them. Conclusive: all
    pages are read."""
    named = {name for page in pages.pages() for name in re.findall(r"python -m bench\.(\w+)", page.read_text("utf-8"))}
    assert named <= {*NAMES, "pages", "gpu_session", "trace_picture"}


def test_pages_show_what_was_measured() -> None:
    """Claim: every table between marks in README and the pages is that of the committed results. Conclusive: all pages
    are made anew and compared."""
    for page in pages.pages():
        text = page.read_text(encoding="utf-8")
        assert pages.filled(text) == text, f"{page.name}: run python -m bench.pages"
