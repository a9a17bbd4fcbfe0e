"""A target's tokens as text, and text as a draft's tokens, where the two have different tokenizers.

Tokens that stand for equal bytes are equal tokens; the draft proposes those (TLI, Timor et al. 2025). It reads all
others, and whole prompts, as text in its own tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specdec.folders import TOKENIZER_BYTES_MAX, read_json
from specdec.protocol.fingerprint import vocabulary_size
from specdec.tokenizer_file import whole_tokenizer

SPACE = "\u2581"  # the space of tokenizers in the manner of SentencePiece
ATTACHED = (".", ",", "?", "!")  # to the word before, in tokenizers by words
PENDING_MAX = 8  # tokens without a whole character; more form none


def alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes with (GPT-2): printable bytes as themselves, the others in
    order from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def components(part: Any) -> Iterator[dict[str, Any]]:
    """Yields a component of a tokenizer.json and those inside it."""
    if isinstance(part, dict):
        yield part
        for inner in part.values():
            yield from components(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from components(inner)


def token_bytes(tokenizer: dict[str, Any]) -> list[bytes | None]:
    """Returns the bytes of every token of a tokenizer.json, by id; None for special tokens and ids without a string."""
    found: list[bytes | None] = [None] * vocabulary_size(tokenizer)
    model = tokenizer.get("model", {})
    vocabulary = model.get("vocab", {})
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((own[0], i) for i, own in enumerate(vocabulary))
    steps = [own for key in ("pre_tokenizer", "decoder") for own in components(tokenizer.get(key))]
    kinds = {own.get("type") for own in steps}
    letters = alphabet() if "ByteLevel" in kinds else None
    prefix = next((own.get("prefix") for own in steps if own.get("type") == "WordPiece"), None)
    suffix = next((own.get("suffix") for own in steps if own.get("type") == "BPEDecoder"), None)
    for string, token_id in pairs:
        if letters is not None and all(letter in letters for letter in string):
            found[token_id] = bytes(letters[letter] for letter in string)
        elif is_byte(string):
            found[token_id] = bytes([int(string[3:5], 16)])
        elif prefix:
            is_attached = string.startswith(prefix) or string in ATTACHED
            found[token_id] = (string.removeprefix(prefix) if is_attached else f" {string}").encode()
        elif suffix and string.endswith(suffix):
            found[token_id] = (string[: -len(suffix)] + " ").encode()
        else:
            found[token_id] = (string if letters else string.replace(SPACE, " ")).encode()
    for entry in tokenizer.get("added_tokens", ()):
        found[entry["id"]] = None if entry.get("special") else entry["content"].encode()
    return found


def is_byte(string: str) -> bool:
    """Whether a token's string names one byte, as <0x0A> does."""
    return len(string) == 6 and string.startswith("<0x") and string.endswith(">")


def ids_by_bytes(tokenizer: dict[str, Any], of: Sequence[bytes | None]) -> dict[bytes, int]:
    """Returns the token of each string of bytes: of several, one that does not name a byte."""
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    strings = vocabulary if isinstance(vocabulary, dict) else {own[0]: i for i, own in enumerate(vocabulary)}
    named = {token_id for string, token_id in strings.items() if is_byte(string)}
    found: dict[bytes, int] = {}
    for token_id, data in enumerate(of):
        if data and (data not in found or found[data] in named):
            found[data] = token_id
    return found


class Retokenizer:
    """Two tokenizers, in files; `target` is that of the target. `own_of`: the draft's token by the target's, for those
    of equal bytes and the ends of a text. `unknown`: the draft's token for a text of which it can read nothing.

    Raises ModelRefused for a file that is no tokenizer.
    """

    def __init__(self, target: Path, draft: Path, target_ends: Sequence[int], draft_ends: Sequence[int]) -> None:
        self.target = target
        source, own = (read_json(file, TOKENIZER_BYTES_MAX) for file in (target, draft))
        self._texts = token_bytes(source)
        self._own_bytes = token_bytes(own)
        self._own_ids = ids_by_bytes(own, self._own_bytes)
        target_ids = ids_by_bytes(source, self._texts)
        self.size = len(self._texts)
        self.own_of = {target_ids[data]: one for data, one in self._own_ids.items() if data in target_ids}
        specials = {entry["content"]: entry["id"] for entry in own.get("added_tokens", ()) if entry.get("special")}
        for entry in source.get("added_tokens", ()):
            if entry.get("special"):
                self._texts[entry["id"]] = entry["content"].encode()
                if entry["content"] in specials:
                    self.own_of[entry["id"]] = specials[entry["content"]]
        if draft_ends:
            self.own_of |= {end: draft_ends[0] for end in target_ends[:1]}
        self._tokenizer = whole_tokenizer(draft)
        self._first = first_tokens(self._tokenizer)
        self.unknown = unknown_id(own, (self._encode("\ufffd") or [0])[0])
        for token_id in first_tokens(whole_tokenizer(target)):
            self._texts[token_id] = b""  # the draft's own first tokens stand for the target's

    def read(self, token_ids: Sequence[int], is_start: bool, is_whole: bool = False) -> tuple[list[int], int]:
        """Returns the draft's tokens for the text of some of the target's, and the number of those read: all up to the
        last whole character, or with `is_whole` all.

        `is_start`: these are the first of a text.
        """
        data = [self._texts[token_id] or b"" for token_id in token_ids]
        count, decoder = 0, codecs.getincrementaldecoder("utf-8")("replace")
        for index, piece in enumerate(data, 1):
            decoder.decode(piece)
            if not decoder.getstate()[0]:
                count = index
        if is_whole or len(data) - count > PENDING_MAX:
            count = len(data)
        found = [one for part in parts_of(b"".join(data[:count])) for one in self._own(part)]
        return (self._first + found if is_start else found), count

    def _own(self, part: str | bytes) -> list[int]:
        """Returns the draft's tokens of a text, or of bytes that form no character."""
        if isinstance(part, str):
            return self._encode(part)
        return self._pieces(part) or self._encode(part.decode("utf-8", "replace"))

    def _encode(self, text: str) -> list[int]:
        """Returns the draft's tokens of a text, without the space that some tokenizers put before every text: it stays
        where a tokenizer by words drops a line end there, and where it has no pieces for the word without it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        first = self._own_bytes[ids[0]] if ids else None
        if not first or not first.startswith(b" ") or text.startswith(" "):
            return ids
        if text[0].isspace() and not text.encode().startswith(first[1:]):
            return ids
        pieces = self._pieces(first[1:])
        is_whole = b"".join(self._own_bytes[one] or b"" for one in pieces) == first[1:]
        return [*pieces, *ids[1:]] if is_whole else ids

    def _pieces(self, data: bytes) -> list[int]:
        """Returns the draft's tokens for some bytes, each as long as possible; without those it has no token for."""
        found = []
        while data:
            size = next((size for size in range(len(data), 0, -1) if data[:size] in self._own_ids), 0)
            if size:
                found.append(self._own_ids[data[:size]])
            data = data[size or 1 :]
        return found


class Reading:
    """A draft's own tokens of a committed text. It reads the first ones, a prompt, as text, and then one after another:
    a token of both is itself, any other is text, once its characters are whole.

    `tokens`: those the draft reads, as ids of the target or, from its vocabulary size on, of the draft.
    """

    def __init__(self, retokenizer: Retokenizer) -> None:
        self.tokens: list[int] = []
        self._retokenizer = retokenizer
        self._places = [(0, 0)]  # (committed tokens, tokens read for them), ascending

    @property
    def length(self) -> int:
        """The number of committed tokens that are read."""
        return self._places[-1][0]

    def read(self, committed: Sequence[int]) -> None:
        """Reads the committed tokens that are not read yet. Those at the end wait while they end inside a character."""
        if not self.length:
            self._read_text(committed, is_start=True)
            if not self.length:  # it ends inside its first character
                self._read_text(committed, is_start=True, is_whole=True)
            if not self.tokens and committed:  # a step needs a token
                self._append([self._retokenizer.size + self._retokenizer.unknown], 0)
        end = self.length + 1
        while end <= len(committed):
            if end == self.length + 1 and committed[end - 1] in self._retokenizer.own_of:
                self._append([committed[end - 1]], 1)
            else:
                self._read_text(committed[self.length : end])
            end = max(end, self.length) + 1

    def _read_text(self, token_ids: Sequence[int], is_start: bool = False, is_whole: bool = False) -> None:
        found, count = self._retokenizer.read(token_ids, is_start, is_whole)
        if count:
            self._append([self._retokenizer.size + own for own in found], count)

    def _append(self, token_ids: Sequence[int], count: int) -> None:
        """Appends tokens that stand for the next `count` committed ones."""
        self.tokens += token_ids
        self._places.append((self.length + count, len(self.tokens)))

    def cut(self, length: int) -> int:
        """Drops all that was read of committed tokens from `length` on; returns the number of tokens kept."""
        while self._places[-1][0] > length:
            self._places.pop()
        del self.tokens[self._places[-1][1] :]
        return len(self.tokens)


def unknown_id(content: dict[str, Any], otherwise: int) -> int:
    """Returns the id of unknown words of a tokenizer.json; `otherwise` if it has none."""
    model = content["model"]
    if model.get("unk_id") is not None:  # of a Unigram model
        return int(model["unk_id"])
    token = model.get("unk_token")
    vocabulary = model.get("vocab", {})
    return int(vocabulary[token]) if token and token in vocabulary else otherwise


def first_tokens(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Returns the special tokens that a tokenizer puts before a text."""
    plain = tokenizer.encode("x", add_special_tokens=False).ids
    found = tokenizer.encode("x").ids
    return found[: found.index(plain[0])] if plain and plain[0] in found else []


def parts_of(data: bytes) -> Iterator[str | bytes]:
    """Yields text, and between it bytes that form no character."""
    while data:
        try:
            yield data.decode()
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield data[: error.start].decode()
            yield data[error.start : error.end]
            data = data[error.end :]
