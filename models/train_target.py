"""Trains the target from nothing on the corpus: next-token cross-entropy, AdamW, cosine learning rate.

Takes the tokens and the tokenizer `models.tokenizer` wrote and leaves a model folder that `transformers` loads.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from models.console import run_command
from models.sizes import SIZES
from models.tokenizer import SPLITS, load_tokenizer, read_tokens
from models.training import (
    add_run_options,
    build_model,
    run_settings,
    save_model,
    show_report,
    train,
)
from specdec.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def copy_tokenizer(source: Path, out: Path) -> None:
    """Puts the tokenizer's files into a model folder."""
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, out / name)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog="python -m models.train_target", description=__doc__)
    add_run_options(options)
    options.add_argument("--tokenizer", type=Path, required=True, help="folder models.tokenizer wrote")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and saves; shows the held-out loss before and after."""
    options = parser().parse_args(arguments)
    size = SIZES[options.size]
    vocabulary_size = load_tokenizer(options.tokenizer).get_vocab_size()
    if vocabulary_size != size.vocabulary_size:
        raise ConfigError(f"the tokenizer has {vocabulary_size} tokens, size {size.name} wants {size.vocabulary_size}")
    settings = run_settings(options, size.target_steps)
    model = build_model(size)
    model.to(settings.device)  # type: ignore[arg-type]  # a wrapper of transformers hides the types of `to`
    arrays = [read_tokens(options.data, split) for split in SPLITS]
    report = train(model, arrays, size, settings)
    save_model(model, report, settings, size, options.out)
    copy_tokenizer(options.tokenizer, options.out)
    print(show_report(report))


if __name__ == "__main__":
    run_command(main)
