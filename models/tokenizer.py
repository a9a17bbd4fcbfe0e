"""Makes the pair's tokenizer from the corpus, and the corpus into tokens.

Byte-level BPE, so that any text has tokens; `<|end|>`, id 0, begins every file and ends text, and is the only special
token. Writes `tokenizer.json` and `tokenizer_config.json` as `transformers` reads them, and one array of token ids
per split.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.console import progress_over, run_command
from models.data import SourceFile, read_corpus
from models.sizes import SIZES, Size
from specdec.errors import ConfigError

END_TOKEN = "<|end|>"
END_TOKEN_ID = 0
SPLITS = ("train", "heldout")


def train_tokenizer(texts: Iterable[str], size: Size) -> Tokenizer:
    """A byte-level BPE tokenizer of the size's vocabulary. Equal texts in equal order give an equal tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size.vocabulary_size,
        special_tokens=[AddedToken(END_TOKEN, special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != size.vocabulary_size:
        raise ConfigError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, {size.vocabulary_size} are wanted")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, size: Size, out: Path) -> None:
    """Writes the files `transformers` loads a tokenizer from."""
    from transformers import PreTrainedTokenizerFast  # here, because importing it takes seconds

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_TOKEN,
        eos_token=END_TOKEN,
        clean_up_tokenization_spaces=False,
        model_max_length=size.positions_max,
    )
    wrapped.save_pretrained(out)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder or of the folder this command wrote."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing; run python -m models.tokenizer first")
    return Tokenizer.from_file(str(path))


def encode_files(tokenizer: Tokenizer, files: Iterable[SourceFile]) -> numpy.ndarray:
    """All files one after another, each begun by `<|end|>`.  # [tokens] uint16"""
    return numpy.concatenate([piece for file in files for piece in encode_file(tokenizer, file)])


def encode_file(tokenizer: Tokenizer, file: SourceFile) -> Iterator[numpy.ndarray]:
    """`<|end|>`, then the file's tokens.  # [tokens] uint16 each"""
    yield numpy.array([END_TOKEN_ID], dtype=numpy.uint16)
    yield numpy.array(tokenizer.encode(file.text, add_special_tokens=False).ids, dtype=numpy.uint16)


def tokens_path(data: Path, split: str) -> Path:
    """Where the tokens of a split lie."""
    return data / f"{split}.npy"


def read_tokens(data: Path, split: str) -> numpy.ndarray:
    """Token ids of a split.  # [tokens] uint16"""
    path = tokens_path(data, split)
    if not path.is_file():
        raise ConfigError(f"{path} is missing; run python -m models.tokenizer first")
    tokens: numpy.ndarray = numpy.load(path, allow_pickle=False)
    return tokens


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog="python -m models.tokenizer", description=__doc__)
    options.add_argument("--data", type=Path, required=True, help="folder models.data wrote; tokens are added to it")
    options.add_argument("--out", type=Path, required=True, help="folder the tokenizer is written to")
    options.add_argument("--size", choices=SIZES, default="full", help="vocabulary (default: %(default)s)")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains on the files not held out, then encodes both splits."""
    options = parser().parse_args(arguments)
    size = SIZES[options.size]
    train_files = read_corpus(options.data / "train.jsonl")
    tokenizer = train_tokenizer((file.text for file in train_files), size)
    save_tokenizer(tokenizer, size, options.out)
    for split in SPLITS:
        files = read_corpus(options.data / f"{split}.jsonl")
        with progress_over(files, f"encoding {split}") as shown:
            token_ids = encode_files(tokenizer, shown)
        numpy.save(tokens_path(options.data, split), token_ids, allow_pickle=False)
        print(f"{split}: {len(token_ids):,} tokens")


if __name__ == "__main__":
    run_command(main)
