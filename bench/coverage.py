"""`python -m bench.coverage`: how often the intervals of `specdec advise` hold on new prompts.

A turn divides the prompts at random: some state the acceptance with its 95 % interval, all others are the new ones,
and theirs lies in the interval or not. The new ones' acceptance has an error of its own: of s prompts that state and n
new ones a perfect interval holds in the normal distribution's share within 1.96 / sqrt(1 + s / n), 0.95 for many new
ones, 0.92 for three times as many.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console

from bench.bars import Bar, worst_of
from bench.results import Cell, Results, Table
from bench.runner import Contender, Prepared, Values, main
from specdec.advise.forecast import Estimate, resampled_part, share
from specdec.advise.measuring import EVERYTHING, Reading, classes_of, readings_of, written
from specdec.advise.report import sums_of
from specdec.engine.loading.model import load_offline_target
from specdec.engine.loading.model_folder import open_model_folder, shown_name
from specdec.errors import ConfigError
from specdec.folders import CHAT_DRAFT, PROMPTS
from specdec.protocol.types import Rule
from tests.support.harness import DRAFT_MODEL, TARGET_MODEL

COVERED_MIN, HALF_WIDTH_MAX = 0.90, 0.05
ADVISE = "advise"
CASES = ((0.0, Rule.GREEDY), *((own, rule) for own in (0.7, 1.0) for rule in (Rule.COUPLED, Rule.REJECTION)))


def division(prompts: Sequence[Sequence[float]], stated: int, turn: int) -> Values:
    """Returns whether the new prompts lie in the interval, and half its width. `prompts`: accepted draft tokens and
    positions of each; `stated` of them state the interval. Raises ConfigError where no prompt is left."""
    if not 2 <= stated < len(prompts):
        raise ConfigError(f"--stated is {stated}; there are {len(prompts)} prompts: it must be 2 or more, fewer")
    order = random.Random(turn).sample(list(prompts), len(prompts))
    told: Estimate = resampled_part(order[:stated])
    seen = share([sum(column) for column in zip(*order[stated:])])
    return {"covered": told.low <= seen <= told.high, "half_width": (told.high - told.low) / 2}


class Coverage:
    """See the module."""

    name = "coverage"
    about = "acceptance of new prompts in the interval that advise states: share, and half the width of the interval"
    turns, quick_turns, minutes = 40, 10, 10

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--target", default=str(TARGET_MODEL), help="folder or hub id (the shipped)")
        parser.add_argument("--drafts", nargs="+", default=[str(DRAFT_MODEL), str(CHAT_DRAFT)], help="(the shipped)")
        parser.add_argument("--prompts", type=Path, default=PROMPTS, help="a file (the shipped)")
        parser.add_argument("--stated", type=int, default=48, help="prompts that state an interval (%(default)s)")

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        return [
            {"draft": shown_name(draft), "temperature": temperature, "rule": rule.name}
            for draft in asked.drafts[: 1 if asked.quick else None]
            for temperature, rule in CASES[: 1 if asked.quick else None]
        ]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        torch.set_num_threads(1)
        console = Console(stderr=True)
        target = load_offline_target(asked.target)
        temperatures, tokens = ("0", 24) if asked.quick else ("0,0.7,1", 96)
        about, prompts = (temperatures, tokens, 0), dict.fromkeys(classes_of(asked.prompts), EVERYTHING)
        texts = written(target, open_model_folder(asked.target), about, prompts, console)
        drafts = {shown_name(name): name for name in asked.drafts}

        @cache
        def readings(draft: str, temperature: float) -> list[Reading]:
            wanted = [text for text in texts if text.params.temperature == temperature]
            return readings_of(target, (asked.target, drafts[draft], draft), wanted, "cpu", Console(quiet=True))

        def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
            own = readings(str(cell["draft"]), float(cell["temperature"]))
            sums = sums_of(own, Rule[str(cell["rule"])])
            return {ADVISE: lambda turn: division(sums, asked.stated, turn)}

        yield contenders

    def by_draft(self, results: Results, measure: str) -> dict[str, list[float]]:
        """The mean of a measure over divisions, of each of a draft's cells."""
        found: dict[str, list[float]] = {}
        for cell, samples in results.found:
            found.setdefault(str(cell["draft"]), []).append(fmean(samples[ADVISE][measure]))
        return found

    def tables(self, results: Results) -> list[Table]:
        covered, widths = self.by_draft(results, "covered"), self.by_draft(results, "half_width")
        rows = [[draft, f"{fmean(own):.3f}", f"±{max(widths[draft]):.3f}"] for draft, own in covered.items()]
        columns = ["draft", f"covered (bar {COVERED_MIN})", f"widest cell (bar ±{HALF_WIDTH_MAX})"]
        return [Table("covered", self.about, columns, rows)]

    def bars(self, results: Results) -> list[Bar]:
        covered = {draft: fmean(own) for draft, own in self.by_draft(results, "covered").items()}
        widths = {draft: max(own) for draft, own in self.by_draft(results, "half_width").items()}
        return [
            worst_of("new prompts in the interval that advise states", COVERED_MIN, covered),
            worst_of("half the width of the widest cell's interval", HALF_WIDTH_MAX, widths, is_limit=True),
        ]


BENCHMARK = Coverage()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
