"""Makes the pairs that an encoder-decoder learns from the corpus: Python text on one line, and the text as it was.

A pair's output is a passage of a file: neighbouring lines, none indented less than the first, without the indentation
of the first. Its input is the same with one space in place of each run of spaces and line ends. Writes
`train_pairs.safetensors`, `heldout_pairs.safetensors` and prompts from held-out files, `formatting_prompts.jsonl`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from models.console import progress_over, run_command
from models.data import SourceFile, parses, read_corpus, write_lines
from models.tokenizer import END_TOKEN_ID, SPLITS, load_tokenizer
from specdec.errors import ConfigError
from specdec.folders import EMBEDDED_MODELS

CHARACTERS_LEAST, CHARACTERS_MOST = 60, 200  # of a passage on one line: its length is drawn between them
TOKENS_MAX = 96  # of each side of a pair, without `<|end|>`; longer ones are left out
PROMPT_COUNT = 200
PROMPT_LINES_MIN = 3


@dataclass(frozen=True, slots=True)
class Pairs:
    """Inputs and outputs of many pairs, one after another; each input ends with `<|end|>`, each output begins with it,
    as the first input of a decoder."""

    inputs: Tensor  # [input tokens] int32
    input_lengths: Tensor  # [pairs] int32
    outputs: Tensor  # [output tokens] int32
    output_lengths: Tensor  # [pairs] int32

    def __len__(self) -> int:
        return len(self.input_lengths)

    def chosen(self, indices: Sequence[int]) -> Pairs:
        """Returns the pairs at these indices, in their order."""
        inputs, outputs = (
            self.inputs.split(self.input_lengths.tolist()),
            self.outputs.split(self.output_lengths.tolist()),
        )
        return Pairs(
            torch.cat([inputs[index] for index in indices]),
            self.input_lengths[list(indices)],
            torch.cat([outputs[index] for index in indices]),
            self.output_lengths[list(indices)],
        )


def flattened(text: str) -> str:
    """Returns the text on one line: a space for each run of spaces and line ends, none at its ends."""
    return " ".join(text.split())


def passages(text: str, chance: random.Random) -> Iterator[str]:
    """Yields the passages of a file, which together are the file but for empty lines and indentation."""
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        if not lines[index].strip():
            index += 1
            continue
        indentation = lines[index][: -len(lines[index].lstrip())]
        limit, size = chance.randint(CHARACTERS_LEAST, CHARACTERS_MOST), 0
        passage: list[str] = []
        while index < len(lines) and (not lines[index].strip() or lines[index].startswith(indentation)):
            size += len(flattened(lines[index])) + 1
            if passage and size > limit:
                break
            passage.append(lines[index][len(indentation) :].rstrip())
            index += 1
        yield "\n".join(passage).rstrip()


def pairs_of(tokenizer: Tokenizer, texts: Sequence[str]) -> Pairs:
    """Returns the pairs of the passages that are short enough. Raises ConfigError if there are none."""
    inputs = tokenizer.encode_batch([flattened(text) for text in texts], add_special_tokens=False)
    outputs = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    kept = [(a.ids, b.ids) for a, b in zip(inputs, outputs) if max(len(a.ids), len(b.ids)) <= TOKENS_MAX]
    if not kept:
        raise ConfigError(f"none of {len(texts)} passages has at most {TOKENS_MAX} tokens")
    return Pairs(
        torch.tensor([token for own, _ in kept for token in (*own, END_TOKEN_ID)], dtype=torch.int32),
        torch.tensor([len(own) + 1 for own, _ in kept], dtype=torch.int32),
        torch.tensor([token for _, own in kept for token in (END_TOKEN_ID, *own)], dtype=torch.int32),
        torch.tensor([len(own) + 1 for _, own in kept], dtype=torch.int32),
    )


def joined(parts: Sequence[Pairs]) -> Pairs:
    """Returns the pairs of all parts, in order."""
    return Pairs(*(torch.cat([getattr(part, own.name) for part in parts]) for own in fields(Pairs)))


def pairs_path(data: Path, split: str) -> Path:
    """Where the pairs of a split lie."""
    return data / f"{split}_pairs.safetensors"


def read_pairs(data: Path, split: str) -> Pairs:
    """Returns the pairs of a split. Raises ConfigError without them."""
    path = pairs_path(data, split)
    if not path.is_file():
        raise ConfigError(f"{path} is missing; run python -m models.formatting first")
    return Pairs(**load_file(path))


def sample_prompts(files: Sequence[SourceFile], tokenizer: Tokenizer, seed: int) -> list[dict[str, str]]:
    """Returns passages of whole statements, the first one with a block, on one line as `prompt` and as they are as
    `text`, at most PROMPT_COUNT and none twice."""
    chance = random.Random(seed)
    found = [
        text
        for file in files
        for text in passages(file.text, chance)
        if text.count("\n") + 1 >= PROMPT_LINES_MIN and text.partition("\n")[0].endswith(":") and parses(text)
    ]
    found = [text for text in dict.fromkeys(found) if len(tokenizer.encode(text).ids) <= TOKENS_MAX]
    chosen = chance.sample(found, min(PROMPT_COUNT, len(found)))
    return [{"prompt": flattened(text), "text": text} for text in chosen]


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog="python -m models.formatting", description=__doc__)
    options.add_argument("--data", type=Path, required=True, help="folder models.data wrote; pairs are added to it")
    options.add_argument(
        "--tokenizer",
        type=Path,
        default=EMBEDDED_MODELS / "target",
        help="folder with a tokenizer.json (default: the shipped)",
    )
    options.add_argument("--seed", type=int, default=0, help="of lengths and prompts (default: %(default)s)")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Cuts both splits into passages and writes their pairs, and the prompts."""
    options = parser().parse_args(arguments)
    tokenizer = load_tokenizer(options.tokenizer)
    for split in SPLITS:
        files = read_corpus(options.data / f"{split}.jsonl")
        chance = random.Random(options.seed)
        with progress_over(files, f"cutting {split}") as shown:
            pairs = joined([pairs_of(tokenizer, list(passages(file.text, chance))) for file in shown])
        save_file({own.name: getattr(pairs, own.name) for own in fields(Pairs)}, pairs_path(options.data, split))
        print(
            f"{split}: {len(pairs):,} pairs, {len(pairs.inputs):,} tokens of inputs, {len(pairs.outputs):,} of outputs"
        )
    prompts = sample_prompts(read_corpus(options.data / "heldout.jsonl"), tokenizer, options.seed)
    write_lines(options.data / "formatting_prompts.jsonl", [{"id": i, **own} for i, own in enumerate(prompts)])


if __name__ == "__main__":
    run_command(main)
