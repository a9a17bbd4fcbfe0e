"""Measures an encoder-decoder pair on prompts: acceptance of the draft's tokens along the target's texts, and how often
the target's greedy text is the original one.

Each prompt is answered once at each temperature. At each position the draft proposes after the same text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers.utils import logging as transformers_logging

from models.console import run_command
from models.distill_encoder_decoder import TEMPERATURES, labelled_texts, labels_of, load_model, written
from models.encoder_decoder import PairLearner, pair_data
from models.formatting import Pairs, flattened, pairs_of
from models.tokenizer import load_tokenizer
from specdec.distill.training import Plan
from specdec.errors import ConfigError
from specdec.folders import EMBEDDED_MODELS

PROMPTS_FILE = EMBEDDED_MODELS / "formatting_prompts.jsonl"
DRAFT_LENGTHS = (2, 4, 8)
BATCH_TEXTS = 32
MEASURING = Plan("kl", (1.0,), 1e-3, 4096, 1, 0.0, 1, 1, 0, "cpu", False, "", "")


@dataclass(frozen=True, slots=True)
class Answers:
    """The target's texts for all prompts at one temperature, with acceptance by position, by rule."""

    texts: list[list[int]]
    accepted: dict[str, list[Tensor]]  # [text's positions] float32 each


def read_rows(path: Path, count: int) -> list[dict[str, str]]:
    """Returns the first prompts of a file. Raises ConfigError without one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read prompts {path}: {error.strerror}; give --prompts FILE") from None
    return [json.loads(line) for line in lines[:count]]


@torch.inference_mode()
def answers_at(temperature: float, pair: tuple[Any, Any], pairs: Pairs) -> Answers:
    """Returns the target's texts, and acceptance of the draft's tokens after each of their tokens."""
    target, learner = pair[0], PairLearner(pair[1], MEASURING)
    inputs = pairs.inputs.split(pairs.input_lengths.tolist())
    texts: list[list[int]] = []
    accepted: dict[str, list[Tensor]] = {}
    for first in range(0, len(pairs), BATCH_TEXTS):
        indices = range(first, min(first + BATCH_TEXTS, len(pairs)))
        outputs = written(target, [inputs[index] for index in indices], temperature)
        labels = labels_of(target, [inputs[index] for index in indices], outputs)
        own = pair_data(labelled_texts(outputs, labels, [temperature] * len(outputs)), pairs.chosen(indices))
        for name, values in learner.acceptances(own.batch(range(len(outputs)))).items():
            accepted.setdefault(name.split()[0], []).extend(values.split([len(text) for text in outputs]))
        texts += [text[1:].tolist() for text in outputs]
    return Answers(texts, accepted)


def estimate(values: Sequence[Tensor]) -> tuple[float, float]:
    """Returns the mean over all positions, and half the width of its 95 % interval over texts."""
    sums, counts = torch.stack([own.sum() for own in values]), torch.tensor([float(len(own)) for own in values])
    mean = sums.sum() / counts.sum()
    deviation = ((sums - mean * counts) ** 2).sum().sqrt() / counts.sum()
    return float(mean), 1.96 * float(deviation)


def tokens_a_round(accepted: Sequence[Tensor], draft_length: int) -> float:
    """Returns the mean number of tokens of a round of at most `draft_length` draft tokens at temperature 0."""
    rounds = tokens = 0
    for own in accepted:
        flags, position = own.tolist(), 0
        while position < len(flags):
            run = 0
            while run < draft_length and position + run < len(flags) and flags[position + run]:
                run += 1
            rounds, position = rounds + 1, position + run + 1
        tokens += len(flags)
    return tokens / rounds


def measure(asked: argparse.Namespace, rows: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Returns all measurements, and the target's greedy texts, as one JSON value."""
    pair = load_model(asked.target), load_model(asked.draft)
    words = load_tokenizer(asked.target)
    pairs = pairs_of(words, [row["text"] for row in rows])
    torch.manual_seed(asked.seed)
    found = {temperature: answers_at(temperature, pair, pairs) for temperature in TEMPERATURES}
    texts = words.decode_batch(found[0.0].texts)
    greedy = found[0.0].accepted["GREEDY"]
    return {
        "prompts": len(rows),
        "same_text": sum(text == row["text"] for text, row in zip(texts, rows)) / len(rows),
        "same_words": sum(flattened(text) == row["prompt"] for text, row in zip(texts, rows)) / len(rows),
        "acceptance": {
            f"{temperature:g} {rule}": estimate(values)
            for temperature, own in found.items()
            for rule, values in own.accepted.items()
        },
        "tokens_a_round": {str(length): tokens_a_round(greedy, length) for length in DRAFT_LENGTHS},
        "texts": texts,
    }


def show(found: dict[str, Any], rows: Sequence[dict[str, str]], shown_count: int) -> None:
    """Prints tables for people, and the first texts."""
    console = Console()
    shares = Table("temperature, rule", "acceptance", "95 %")
    for name, (value, half) in found["acceptance"].items():
        shares.add_row(name, f"{value:.3f}", f"± {half:.3f}")
    rounds = ", ".join(f"{value:.2f} with {length}" for length, value in found["tokens_a_round"].items())
    console.print(shares)
    console.print(f"tokens a round of draft tokens at temperature 0: {rounds}")
    console.print(
        f"greedy texts: {found['same_text']:.2f} the original, {found['same_words']:.2f} but for spaces and lines"
    )
    for row, text in list(zip(rows, found["texts"]))[:shown_count]:
        is_same = "the original" if text == row["text"] else "another"
        console.print(f"\n{row['prompt']}\n--- {is_same}\n{text}", markup=False, highlight=False, soft_wrap=True)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog="python -m models.evaluate_encoder_decoder", description=__doc__)
    options.add_argument(
        "--target", type=Path, default=EMBEDDED_MODELS / "formatting-target", help="model folder (default: shipped)"
    )
    options.add_argument(
        "--draft", type=Path, default=EMBEDDED_MODELS / "formatting-draft", help="model folder (default: shipped)"
    )
    options.add_argument("--prompts", type=Path, default=PROMPTS_FILE, help="prompts with texts (default: the shipped)")
    options.add_argument("--prompt-count", type=int, default=200, help="at most (default: %(default)s)")
    options.add_argument("--show", type=int, default=0, help="texts to print (default: %(default)s)")
    options.add_argument("--seed", type=int, default=0, help="of the texts (default: %(default)s)")
    options.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    options.add_argument("--json", action="store_true", help="print one JSON value instead of tables")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and shows."""
    asked = parser().parse_args(arguments)
    if min(asked.prompt_count, asked.threads) < 1:
        raise ConfigError("--prompt-count and --threads must be at least 1")
    torch.set_num_threads(asked.threads)
    transformers_logging.disable_progress_bar()
    rows = read_rows(asked.prompts, asked.prompt_count)
    found = measure(asked, rows)
    if asked.json:
        print(json.dumps(found))
    else:
        show(found, rows, asked.show)


if __name__ == "__main__":
    run_command(main)
