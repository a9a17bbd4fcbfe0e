"""Text to token ids and back, with the `tokenizers` library alone.

Special-token rules are the tokenizer file's own, as in `transformers` if the file exists; its `truncation` and
`padding` do not apply. Decoding is incremental and holds back bytes that do not form a character.
"""

from __future__ import annotations

import codecs
import json
import re
from itertools import islice

import tokenizers

from specdec.errors import InvalidRequest, ModelRefused, refusing
from specdec.folders import TOKENIZER_BYTES_MAX, has_file, parse_json, read_text, tokenizer_file
from specdec.protocol.fingerprint import check_tokens, tokenizer_fingerprint

CONTEXT_UNITS = 4  # the most that one character of UTF-8 has, a byte each
CONTEXT_UNITS_MAX = 16  # then the first ones are dropped; each further token decodes all of them
REPLACEMENT_CHARACTER = "\ufffd"
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
BYTES_PER_TOKEN_MAX = 64  # a prompt of more bytes than this per position is refused before it is tokenised


class Tokenizer:
    """The tokenizer of a model folder or hub id. Safe to use from several threads.

    `joins_bytes`: tokens are pieces of UTF-8 (ByteLevel); `has_byte_tokens`: some stand for one byte (ByteFallback).
    """

    def __init__(self, path_or_hub_id: str) -> None:
        path = tokenizer_file(path_or_hub_id)
        if not has_file(path):
            raise ModelRefused(f"{path} is missing; the coordinator needs the target's tokenizer.json")
        source = read_text(path, TOKENIZER_BYTES_MAX)
        content = parse_json(path, source)
        check_tokens(str(path), content)
        with refusing(f"{path} is not a tokenizer file"):
            self.fingerprint = tokenizer_fingerprint(content)
            self._tokenizer = tokenizers.Tokenizer.from_str(source)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._decoder = self._tokenizer.decoder
            self._tokenizer.decoder = None  # it decodes a token to the string that the decoder reads
        steps = json.dumps(content.get("decoder"))
        self.joins_bytes, self.has_byte_tokens = '"ByteLevel"' in steps, '"ByteFallback"' in steps

    def encode(self, text: str, positions_max: int, field: str = "prompt.text") -> tuple[int, ...]:
        """Returns the token ids of a prompt, with the file's special tokens, or of another field, without. Raises
        InvalidRequest for a text far too long."""
        size, limit = len(text.encode("utf-8", "surrogatepass")), positions_max * BYTES_PER_TOKEN_MAX
        if size > limit:
            raise InvalidRequest(field, f"{size} bytes", f"at most {limit} bytes")
        # Unlike `encode`, `encode_batch` releases the interpreter's lock.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=field == "prompt.text")
        return tuple(encoding.ids)

    def stream(self, prompt: tuple[int, ...] = ()) -> TextStream:
        """Returns a decoder for the text that continues `prompt`."""
        return TextStream(self, prompt)

    def piece(self, token_id: int) -> str:
        """Returns a token's string as the decoder reads it; empty for special tokens and ids without a token."""
        return self._tokenizer.decode([token_id], skip_special_tokens=True)

    def text(self, pieces: list[str]) -> str:
        """Returns the text of the strings of some tokens."""
        return " ".join(pieces) if self._decoder is None else self._decoder.decode(pieces)


class TextStream:
    """Decodes one text token by token; special tokens have no text. A function of prompt and tokens alone.

    Its text is that of prompt and tokens together less that of the prompt. A character that the prompt leaves
    incomplete is part of it, whole, if the tokens complete it; otherwise its U+FFFD are the prompt's. A byte token that
    is part of no character is one U+FFFD, whatever surrounds it: the library makes a whole row of byte tokens U+FFFD if
    it holds such a one, but sent text is not taken back.

    Each token is decoded after a context. The last few tokens suffice, even where they begin inside a character: of
    earlier ones a decoder knows only that there are some (the space before a text's very first word), of the last one
    what it is (an end of a word, a repetition), and of the last four bytes whether they form or begin a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._context: list[list[str]] = []  # units of pieces: the byte tokens of a whole character, or one other token
        self._text = ""  # of the context
        self._bytes = b""  # byte tokens that begin a character, not in the context yet
        self._of_prompt = ""
        pieces = list(islice(filter(None, map(tokenizer.piece, reversed(prompt))), CONTEXT_UNITS_MAX))
        for piece in reversed(pieces):
            self._append(piece)
        self._of_prompt = self.rest()

    def step(self, token_id: int) -> str:
        """Returns the text that became final with this token; empty while a character is incomplete."""
        piece = self._tokenizer.piece(token_id)
        text = self._append(piece) if piece else ""
        if text:
            text, self._of_prompt = text.removeprefix(self._of_prompt), ""
        return text

    def rest(self) -> str:
        """Returns the rest of a text that ends here: replacement characters for an incomplete one."""
        rest = self._text[self._final_length() :] + REPLACEMENT_CHARACTER * len(self._bytes)
        return rest.removeprefix(self._of_prompt)

    def _append(self, piece: str) -> str:
        """Appends a token to the context; returns the text that became final."""
        units = self._units(piece)
        if not units:
            return ""
        if len(self._context) >= CONTEXT_UNITS_MAX:
            self._decode(self._context[-CONTEXT_UNITS:])
        length = self._final_length()
        self._decode(self._context + units)
        return self._text[length : self._final_length()]

    def _units(self, piece: str) -> list[list[str]]:
        """Returns the units that are whole with this token: characters, and bytes that are part of none."""
        byte = BYTE_TOKEN.fullmatch(piece) if self._tokenizer.has_byte_tokens else None
        if byte is None:
            units = [[REPLACEMENT_CHARACTER] for _ in self._bytes] + [[piece]]
            self._bytes = b""
            return units
        self._bytes += bytes.fromhex(byte[1])
        units = []
        while self._bytes:
            try:
                size = codecs.utf_8_decode(self._bytes)[1]
                if not size:  # a character begins here
                    break
                units.append([f"<0x{value:02X}>" for value in self._bytes[:size]])
            except UnicodeDecodeError as error:
                size = error.end
                units += [[REPLACEMENT_CHARACTER]] * size
            self._bytes = self._bytes[size:]
        return units

    def _decode(self, context: list[list[str]]) -> None:
        self._context = context
        self._text = self._tokenizer.text([piece for unit in context for piece in unit])

    def _final_length(self) -> int:
        """The length of the context's text without a last U+FFFD that may stand for the first bytes of a character."""
        return len(self._text.removesuffix(REPLACEMENT_CHARACTER if self._tokenizer.joins_bytes else ""))
