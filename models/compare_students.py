"""Compares students of one target that learn the same texts for the same time: losses, sizes, a part of the vocabulary,
and learning from a part of the tokens. Time is CPU time, so that other work on the machine decides nothing.

Acceptance is that of the best evaluation, by its mean over rules and temperatures, on held-out texts. The last student
leaves out of its loss the tokens that a draft cannot learn: it learns those where it is behind a reference draft most
(Hu et al. 2025, AdaSPEC).
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM

from models.console import run_command
from models.distill_draft import settings_of
from models.sizes import SIZES
from specdec.distill.command import distill
from specdec.distill.learners import DraftLearner, losses_of
from specdec.distill.losses import Labels
from specdec.distill.training import Batch
from specdec.errors import ConfigError
from specdec.folders import EMBEDDED_MODELS

REFERENCE, FILTERED = "1 layer, KL", "tokens behind the reference"
COLUMNS = ("GREEDY 0", "COUPLED 0.7", "REJECTION 0.7", "COUPLED 1", "REJECTION 1")
LEARNED_SHARE = 0.4  # of the tokens, as in the paper
STUDENTS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "total variation": {"loss": "tv"},
    "negative log acceptance": {"loss": "nla"},
    "2 layers": {"layers": 2},
    "half the hidden size": {"hidden_size": 0.5},
    "a quarter of the vocabulary": {"draft_vocabulary": 0.25},
    FILTERED: {},
}


class FilteredLearner(DraftLearner):
    """Learns only the LEARNED_SHARE of the tokens whose loss exceeds that of a reference draft most."""

    def __init__(self, *arguments: Any, reference: Path) -> None:
        super().__init__(*arguments)
        self._reference = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32).eval()

    def chosen(self, batch: Batch, labels: Labels, losses: Tensor) -> Tensor:
        """Returns the losses of the chosen positions.  # [chosen]"""
        with torch.no_grad():
            its_logits = self._reference(input_ids=batch.inputs, use_cache=False).logits[batch.learned].float()
            its_own = losses_of(self._plan, labels, its_logits)
        return farthest_behind(losses, its_own)


def farthest_behind(own: Tensor, reference: Tensor) -> Tensor:
    """Returns the losses of the LEARNED_SHARE of positions that exceed the reference's most.  own, reference: [n]"""
    return own[(own.detach() - reference).topk(max(1, int(LEARNED_SHARE * len(own)))).indices]


def folder_of(name: str, asked: argparse.Namespace) -> Path:
    """The folder of a student."""
    out: Path = asked.out / re.sub(r"[^0-9A-Za-z]+", "-", name)
    return out


def train(name: str, asked: argparse.Namespace) -> None:
    """Trains one student, unless it was. Raises SpecdecError."""
    out = folder_of(name, asked)
    if (out / "training.json").is_file():
        return
    config = json.loads((asked.target / "config.json").read_text(encoding="utf-8"))
    whole = {"hidden_size": config["hidden_size"], "draft_vocabulary": config["vocab_size"]}
    shape = {key: int(value * whole[key]) if key in whole else value for key, value in STUDENTS[name].items()}
    about = {"texts": asked.out / "texts", "patience": 1000, "minutes": asked.minutes, "threads": asked.threads}
    settings = settings_of(
        SIZES[asked.size],
        asked.data,
        target=str(asked.target),
        out=out,
        text_count=asked.text_count,
        text_tokens=asked.text_tokens,
        evaluate_tokens=asked.evaluate_tokens,
        bf16=asked.bf16,
        **about,
        **shape,
    )
    filtered = partial(FilteredLearner, reference=folder_of(REFERENCE, asked))
    distill(settings, filtered if name == FILTERED else DraftLearner, time.process_time)


def table_of(names: Sequence[str], asked: argparse.Namespace) -> Table:
    """Returns the table, a line for each student."""
    table = Table("student", title=f"held-out acceptance of a draft token after {asked.minutes:g} minutes")
    for column in ("M parameters", "k tokens", *COLUMNS, "mean"):
        table.add_column(column, justify="right")
    for name in names:
        facts = json.loads((folder_of(name, asked) / "training.json").read_text(encoding="utf-8"))
        best = max((entry["acceptance"] for entry in facts["history"]), key=lambda own: sum(own.values()))
        learned = facts["history"][-1]["tokens"] / 1e3
        shares = [f"{best[column]:.3f}" for column in COLUMNS]
        mean = sum(best.values()) / len(best)
        table.add_row(name, f"{facts['parameters'] / 1e6:.1f}", f"{learned:.0f}", *shares, f"{mean:.3f}")
    return table


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog="python -m models.compare_students", description=__doc__)
    options.add_argument("--data", type=Path, required=True, help="folder models.data wrote")
    options.add_argument("--out", type=Path, required=True, help="folder of texts and students; finished ones are kept")
    options.add_argument(
        "--target", type=Path, default=EMBEDDED_MODELS / "target", help="model folder (default: shipped)"
    )
    options.add_argument("--size", choices=SIZES, default="full", help="of the target (default: %(default)s)")
    options.add_argument("--text-count", type=int, default=2048, help="texts to learn (default: %(default)s)")
    options.add_argument("--text-tokens", type=int, default=128, help="of a text, at most (default: %(default)s)")
    options.add_argument("--evaluate-tokens", type=int, default=150_000, help="between evaluations")
    options.add_argument("--minutes", type=float, default=1.0, help="of training, each (default: %(default)s)")
    options.add_argument("--students", nargs="+", default=list(STUDENTS), help="some of them (default: all)")
    options.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    options.add_argument("--bf16", action="store_true", help="matrix products in bf16; faster where the CPU has it")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains all students in turn and prints the table."""
    asked = parser().parse_args(arguments)
    if unknown := set(asked.students) - set(STUDENTS):
        raise ConfigError(f"--students has {sorted(unknown)}; there are {list(STUDENTS)}")
    for name in asked.students:
        train(name, asked)
    Console(width=120).print(table_of(asked.students, asked))


if __name__ == "__main__":
    run_command(main)
