"""Small tokenizers of every kind of decoder, and texts cut into their tokens at random places.

A kind cuts a text into the strings of tokens by itself, so that tokens begin and end anywhere: inside a word, or, where
tokens are bytes, inside a character. The library alone turns tokens into text.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models

from specdec.engine.retokenizer import SPACE, alphabet

SPECIAL = ("<s>", "<pad>")  # ids 0 and 1
PAD = "[PAD]"  # of CTC: a token without a text of its own, that is no special token
LETTER_OF = {byte: letter for letter, byte in alphabet().items()}
TEXTS = (
    "PROMPT ONLY: robot 🤖 robot-",
    " two  spaces, it's  fine . ",
    "👩‍👩‍👧 and 🏳️‍🌈",
    "e\u0301n\u0303 é \u2581 x",
    "日本語 mit Ümlaut",
    *(letter * count for letter in "é日🤖" for count in (1, 3, 20)),
)
Cut = Callable[[str, random.Random], list[str]]


def chunks(whole: Sequence, rng: random.Random, longest: int) -> list:
    """Cuts a sequence into parts of 1 to `longest` items."""
    found, place = [], 0
    while place < len(whole):
        size = rng.randint(1, longest)
        found.append(whole[place : place + size])
        place += size
    return found


def cut_bytes(text: str, rng: random.Random) -> list[str]:
    """As byte-level BPE: each token some bytes, in the letters of the GPT-2 alphabet."""
    return [letters_of(part) for part in chunks(text.encode(), rng, rng.choice((1, 3, 5)))]


def letters_of(data: bytes) -> str:
    """Bytes in the letters of the GPT-2 alphabet."""
    return "".join(LETTER_OF[byte] for byte in data)


def byte_tokens(data: bytes) -> list[str]:
    """The tokens of some bytes, one each, in the manner of SentencePiece."""
    return [f"<0x{byte:02X}>" for byte in data]


def cut_marked(text: str, rng: random.Random) -> list[str]:
    """As SentencePiece without byte tokens: some characters a token, a mark for each space, one before the text."""
    return chunks(SPACE + text.replace(" ", SPACE), rng, 3)


def cut_marked_or_bytes(text: str, rng: random.Random) -> list[str]:
    """As SentencePiece with byte tokens: some characters, few or all, in bytes."""
    share = rng.choice((0.3, 0.7, 1.0))
    parts = [part for letter in text for part in (byte_tokens(letter.encode()) if rng.random() < share else [letter])]
    return [SPACE, *(part.replace(" ", SPACE) for part in parts)]


def cut_words(text: str, rng: random.Random) -> list[str]:
    """As WordPiece: words, their further parts with a prefix."""
    return [("##" if at else "") + part for word in text.split() for at, part in enumerate(chunks(word, rng, 3))]


def cut_ended_words(text: str, rng: random.Random) -> list[str]:
    """As the first BPE: the last part of a word has a suffix."""
    words = [chunks(word, rng, 3) for word in text.split()]
    return [part + ("</w>" if at == len(parts) - 1 else "") for parts in words for at, part in enumerate(parts)]


def cut_letters(text: str, rng: random.Random) -> list[str]:
    """As CTC: letters, some more than once, a pad token between equal ones, a delimiter for each space."""
    found: list[str] = []
    for letter in text.replace(" ", "|"):
        if (found and found[-1] == letter) or rng.random() < 0.2:
            found += [PAD] * rng.randint(1, 3)
        found += [letter] * rng.choice((1, 1, 2))
    return found


@dataclass(frozen=True)
class Kind:
    """A decoder, the class of its model and the way to cut a text."""

    decoder: decoders.Decoder | None
    model: Callable[[dict[str, int]], models.Model]
    cut: Cut


def unigram(vocabulary: dict[str, int]) -> models.Unigram:
    """A Unigram model in which all tokens are as likely."""
    return models.Unigram([(piece, -1.0) for piece in vocabulary], 0, any(map(is_byte_token, vocabulary)))


def byte_fallback_bpe(vocabulary: dict[str, int]) -> models.BPE:
    """A BPE model in the manner of SentencePiece."""
    return models.BPE(vocabulary, [], unk_token=SPECIAL[0], byte_fallback=True)


def is_byte_token(piece: str) -> bool:
    """Whether a token's string names one byte."""
    return piece.startswith("<0x")


SPACES = decoders.Replace(SPACE, " ")
BYTES = decoders.ByteFallback()
FUSED = decoders.Fuse()
KINDS = {
    "byte level": Kind(decoders.ByteLevel(), lambda own: models.BPE(own, []), cut_bytes),
    "byte level, stripped": Kind(
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), lambda own: models.BPE(own, []), cut_bytes
    ),
    "llama": Kind(
        decoders.Sequence([SPACES, BYTES, FUSED, decoders.Strip(" ", 1, 0)]), byte_fallback_bpe, cut_marked_or_bytes
    ),
    "gemma": Kind(decoders.Sequence([SPACES, BYTES, FUSED]), byte_fallback_bpe, cut_marked_or_bytes),
    "byte tokens as they are": Kind(decoders.Sequence([SPACES, FUSED]), byte_fallback_bpe, cut_marked_or_bytes),
    "unigram with bytes": Kind(decoders.Sequence([BYTES, decoders.Metaspace()]), unigram, cut_marked_or_bytes),
    "metaspace": Kind(decoders.Metaspace(), unigram, cut_marked),
    "metaspace, kept": Kind(decoders.Metaspace(prepend_scheme="never"), unigram, cut_marked),
    "stripped of two": Kind(decoders.Sequence([SPACES, FUSED, decoders.Strip(" ", 2, 0)]), unigram, cut_marked),
    "stripped at the end": Kind(decoders.Sequence([SPACES, FUSED, decoders.Strip(" ", 0, 1)]), unigram, cut_marked),
    "wordpiece": Kind(decoders.WordPiece(), lambda own: models.WordPiece(own, unk_token=SPECIAL[0]), cut_words),
    "wordpiece, not cleaned": Kind(
        decoders.WordPiece(cleanup=False), lambda own: models.WordPiece(own, unk_token=SPECIAL[0]), cut_words
    ),
    "words with an end": Kind(decoders.BPEDecoder(), lambda own: models.BPE(own, []), cut_ended_words),
    "ctc": Kind(decoders.CTC(pad_token=PAD), lambda own: models.WordLevel(own, unk_token=SPECIAL[0]), cut_letters),
    "no decoder": Kind(None, lambda own: models.WordLevel(own, unk_token=SPECIAL[0]), cut_words),
}


def write_tokenizer(folder: Path, kind: Kind, texts: Sequence[Sequence[str]]) -> tokenizers.Tokenizer:
    """Writes a folder with the tokenizer of a kind, for texts cut into strings of tokens, and returns it."""
    pieces = [*SPECIAL, *(piece for pieces in texts for piece in pieces)]
    if any(map(is_byte_token, pieces)):
        pieces += byte_tokens(bytes(range(256)))
    tokenizer = tokenizers.Tokenizer(kind.model({piece: at for at, piece in enumerate(dict.fromkeys(pieces))}))
    if kind.decoder is not None:
        tokenizer.decoder = kind.decoder
    tokenizer.add_special_tokens(list(SPECIAL))
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def common_length(first: str, second: str) -> int:
    """The length of the common beginning of two texts."""
    return len(os.path.commonprefix([first, second]))
