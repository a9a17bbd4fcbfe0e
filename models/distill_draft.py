"""Makes the draft of the embedded pair with `specdec distill`: one layer that imitates the target.

The texts are windows of the corpus, every second one continued by the target; the loss is the forward divergence
KL(target || draft), which bounds what rejection loses: 1 - sum min(target, draft) <= sqrt(KL / 2) (Pinsker).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.console import run_command
from models.data import read_corpus
from models.sizes import SIZES, Size
from specdec.distill.command import distill
from specdec.distill.settings import DistillSettings

EVALUATIONS = 16  # of a run


def corpus_folder(data: Path) -> Path:
    """Writes the training files of `models.data` below its folder, if they are not there; returns where they are.
    Raises ConfigError without them."""
    folder = data / "files"
    for index, file in enumerate(read_corpus(data / "train.jsonl")):
        path = folder / f"{index:05d}.py"
        if not path.is_file():
            folder.mkdir(exist_ok=True)
            path.write_text(file.text, encoding="utf-8")
    return folder


def settings_of(size: Size, data: Path, **others: Any) -> DistillSettings:
    """Returns the settings of `specdec distill` for a pair of this size. `others`: `target` and `out`, and settings
    that replace these; with `minutes` the run has no token budget. Raises ConfigError."""
    length = {} if others.get("minutes") else {"tokens": size.draft_tokens}
    given: dict[str, Any] = {
        "corpus": corpus_folder(data),
        "text_count": size.draft_text_count,
        "text_tokens": size.sequence_length,
        "batch_tokens": size.batch_size * size.sequence_length,
        "evaluate_tokens": size.draft_tokens // EVALUATIONS,
        "learning_rate": size.learning_rate,
        "layers": 1,
        "device": "cpu",
        **length,
    }
    return DistillSettings(**given | others)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog="python -m models.distill_draft", description=__doc__)
    options.add_argument("--data", type=Path, required=True, help="folder models.data wrote")
    options.add_argument("--target", type=Path, required=True, help="folder models.train_target wrote")
    options.add_argument("--out", type=Path, required=True, help="model folder to write; its texts lie in it too")
    options.add_argument("--size", choices=SIZES, default="full", help="amount of text and training")
    options.add_argument(
        "--minutes", type=float, default=0.0, help="time instead of the size's tokens; not reproducible"
    )
    options.add_argument("--seed", type=int, default=0, help="of the order (default: %(default)s)")
    options.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one per core (default)")
    options.add_argument("--device", default="cpu", help="cpu, cuda, … (default: %(default)s)")
    options.add_argument("--bf16", action="store_true", help="matrix products in bf16; faster where the CPU has it")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Distils and saves."""
    asked = vars(parser().parse_args(arguments))
    size, data, target = SIZES[asked.pop("size")], asked.pop("data"), str(asked.pop("target"))
    distill(settings_of(size, data, target=target, **asked))


if __name__ == "__main__":
    run_command(main)
