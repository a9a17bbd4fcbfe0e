"""`python -m bench.coverage`: how often the intervals of `specdec advise` hold on new prompts.

Prompts are divided at random, many times: some state a cell's acceptance with its 95 % interval, all others are the new
ones, and their acceptance lies in the interval or not. A cell is a draft, a class of prompts, a temperature and a rule.
The new ones' acceptance has an error of its own: of s prompts that state and n new ones a perfect interval holds in the
normal distribution's share within 1.96 / sqrt(1 + s / n), 0.95 for many new ones, 0.92 for three times as many, 0.74
for half as many.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from bench.bars import Bar, add_check_flag, as_json, conclude
from models.data import PROMPTS_FILE
from specdec.advise.forecast import Estimate, resampled_part, share
from specdec.advise.measuring import Reading, classes_of, readings_of, written
from specdec.advise.report import sums_of
from specdec.engine.loading.model import load_offline_target
from specdec.engine.loading.model_folder import open_model_folder, shown_name
from specdec.errors import ConfigError, SpecdecError
from tests.support.harness import DRAFT_MODEL, TARGET_MODEL

COVERED_MIN = 0.90
HALF_WIDTH_MAX = 0.05


@dataclass(frozen=True, slots=True)
class Coverage:
    """Over cells and divisions: the share whose new prompts lie in the interval, and half its mean width, of all cells
    and of the widest."""

    cells: int
    covered: float
    half_width: float
    half_width_max: float

    def bars(self) -> list[Bar]:
        """The goals."""
        return [
            Bar("new prompts in the stated interval", COVERED_MIN, self.covered),
            Bar("half the width of the widest cell's interval", HALF_WIDTH_MAX, self.half_width_max, is_limit=True),
        ]


def coverage_of(cells: Sequence[Sequence[Sequence[float]]], stated: int, divisions: int) -> Coverage:
    """Returns the coverage. A cell has accepted draft tokens and positions of each prompt; `stated` of its prompts
    state the interval. Raises ConfigError for a cell with no prompt left."""
    draws = random.Random(0)
    hits, widths = list[bool](), list[float]()
    for prompts in cells:
        if not 2 <= stated < len(prompts):
            raise ConfigError(f"--stated is {stated}; a cell has {len(prompts)} prompts: it must be 2 or more, fewer")
        own = []
        for _ in range(divisions):
            order = draws.sample(prompts, len(prompts))
            told: Estimate = resampled_part(order[:stated])
            seen = share([sum(column) for column in zip(*order[stated:])])
            hits.append(told.low <= seen <= told.high)
            own.append((told.high - told.low) / 2)
        widths.append(statistics.fmean(own))
    return Coverage(len(cells), statistics.fmean(hits), statistics.fmean(widths), max(widths))


def cells_of(readings: Sequence[Reading]) -> list[list[list[float]]]:
    """Returns, by class, temperature and rule, accepted draft tokens and positions of each text."""
    groups: dict[tuple[str, float], list[Reading]] = defaultdict(list)
    for reading in readings:
        groups[reading.text.prompt_class, reading.text.params.temperature].append(reading)
    return [sums_of(own, rule) for own in groups.values() for rule in own[0].agreement.accepted]


def measured(asked: argparse.Namespace, console: Console) -> list[list[list[float]]]:
    """Has the target answer all prompts and every draft read the answers; returns the cells. Raises SpecdecError."""
    target = load_offline_target(asked.target)
    classes = dict(itertools.islice(classes_of(asked.prompts).items(), asked.prompt_count or None))
    about = asked.text_temperatures, asked.text_tokens, asked.text_seed
    texts = written(target, open_model_folder(asked.target), about, classes, console)
    drafts = asked.draft or [str(DRAFT_MODEL)]
    names = [(asked.target, name, shown_name(name)) for name in drafts]
    readings = (readings_of(target, each, texts, "cpu", console) for each in names)
    return [cell for own in readings for cell in cells_of(own)]


def main() -> int:
    """Measures and prints."""
    options = argparse.ArgumentParser(prog="python -m bench.coverage", description=__doc__)
    options.add_argument("--target", default=str(TARGET_MODEL), help="folder or hub id (default: the shipped)")
    options.add_argument("--draft", action="append", help="may be repeated (default: the shipped)")
    options.add_argument("--prompts", type=Path, default=PROMPTS_FILE, help="prompts file (default: the shipped)")
    options.add_argument("--prompt-count", type=int, default=0, help="of the file, the first ones; 0: all (default)")
    options.add_argument("--stated", type=int, default=48, help="prompts that state an interval (default: %(default)s)")
    options.add_argument("--divisions", type=int, default=40, help="of the prompts (default: %(default)s)")
    options.add_argument("--text-tokens", type=int, default=96, help="of an answer, at most (default: %(default)s)")
    options.add_argument("--text-temperatures", default="0,0.7,1", help="default: %(default)s")
    options.add_argument("--text-seed", type=int, default=0, help="default: %(default)s")
    options.add_argument("--json", metavar="FILE", help="write the results")
    add_check_flag(options)
    asked = options.parse_args()
    torch.set_num_threads(1)
    try:
        cells = measured(asked, Console(stderr=True))
        found = coverage_of(cells, asked.stated, asked.divisions)
    except SpecdecError as error:
        print(f"specdec: {error}", file=sys.stderr)
        return error.exit_code
    told = f"{found.covered:.3f} covered, intervals of ±{found.half_width:.3f}, at most ±{found.half_width_max:.3f}"
    print(f"{found.cells} cells, {asked.divisions} divisions: {told}")
    if asked.json:
        results = asdict(found) | {"bars": as_json(found.bars()), "accepted_and_positions_by_prompt": cells}
        Path(asked.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return conclude(found.bars(), Console(), asked.check)


if __name__ == "__main__":
    sys.exit(main())
