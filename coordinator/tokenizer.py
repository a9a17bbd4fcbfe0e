"""Text to token ids and back, with the `tokenizers` library alone.

Special-token rules are the tokenizer file's own, as in `transformers` if the file exists; its `truncation` and
`padding` do not apply. Decoding is incremental and holds back bytes that do not form a character.
"""

from __future__ import annotations

import codecs
import re
from functools import lru_cache
from itertools import islice

import tokenizers

from specdec.errors import InvalidRequest, ModelRefused, refusing
from specdec.folders import TOKENIZER_BYTES_MAX, has_file, parse_json, read_text, tokenizer_file
from specdec.protocol.fingerprint import check_tokens, tokenizer_fingerprint

CONTEXT_TOKENS = 4  # the most that one character of UTF-8 has, a byte each
CONTEXT_TOKENS_MAX = 8  # then the first ones are dropped; each further token decodes all of them
PIECE_COUNT_KEPT = 1 << 15  # of tokens' strings, which texts ask for again and again
EARLIER = "x"  # stands for the tokens before a context
REPLACEMENT_CHARACTER = "\ufffd"
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
BYTES_PER_TOKEN_MAX = 64  # a prompt of more bytes than this per position is refused before it is tokenised


class Tokenizer:
    """The tokenizer of a model folder or hub id. Safe to use from several threads.

    `piece(token_id)`: a token's string as the decoder reads it, empty for special tokens and ids without a token.
    `joins_bytes`: tokens are pieces of UTF-8; `has_byte_tokens`: some stand for one byte, such as <0xE6>.
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
        # The three bytes of a character, in the letters of byte-level tokenizers and as byte tokens.
        self.joins_bytes = self.text([EARLIER, "æ", "Ĺ", "¥"]).endswith("日")
        self.has_byte_tokens = self.text([EARLIER, "<0xE6>", "<0x97>", "<0xA5>"]).endswith("日")
        self.piece = lru_cache(PIECE_COUNT_KEPT)(self._piece)

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

    def _piece(self, token_id: int) -> str:
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
        self._context: list[str] = []  # pieces; byte tokens among them are those of whole characters
        self._text = ""  # of the context
        self._final = 0  # length of the text that is final
        self._bytes = b""  # byte tokens that begin a character, not in the context yet
        self._of_prompt = ""
        pieces = list(islice(filter(None, map(tokenizer.piece, reversed(prompt))), CONTEXT_TOKENS_MAX + 1))
        if len(pieces) > CONTEXT_TOKENS_MAX:
            pieces[-1] = EARLIER
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
        rest = self._text[self._final :] + REPLACEMENT_CHARACTER * len(self._bytes)
        return rest.removeprefix(self._of_prompt)

    def _append(self, piece: str) -> str:
        """Appends a token to the context; returns the text that became final."""
        pieces = self._whole(piece) if self._tokenizer.has_byte_tokens else [piece]
        if not pieces:
            return ""
        if len(self._context) >= CONTEXT_TOKENS_MAX:
            self._decode([EARLIER, *filter(self._is_needed, self._context[-CONTEXT_TOKENS:])])
        final = self._final
        self._decode(self._context + pieces)
        return self._text[final : self._final]

    def _is_needed(self, piece: str) -> bool:
        """Whether a piece of the context can matter to later ones: not a character that byte tokens form."""
        return not (self._tokenizer.has_byte_tokens and BYTE_TOKEN.fullmatch(piece))

    def _whole(self, piece: str) -> list[str]:
        """Returns the pieces that are whole with this one: characters, and U+FFFD for bytes that are part of none."""
        byte = BYTE_TOKEN.fullmatch(piece)
        if byte is None:
            pieces = [REPLACEMENT_CHARACTER] * len(self._bytes) + [piece]
            self._bytes = b""
            return pieces
        self._bytes += bytes.fromhex(byte[1])
        pieces = []
        while self._bytes:
            try:
                size = codecs.utf_8_decode(self._bytes)[1]
                if not size:  # a character begins here
                    break
                pieces += [f"<0x{value:02X}>" for value in self._bytes[:size]]
            except UnicodeDecodeError as error:
                size = error.end
                pieces += [REPLACEMENT_CHARACTER] * size
            self._bytes = self._bytes[size:]
        return pieces

    def _decode(self, context: list[str]) -> None:
        """Makes some pieces the context. A last U+FFFD may stand for a character's first bytes: it is not final."""
        self._context, self._text = context, self._tokenizer.text(context)
        is_doubtful = self._tokenizer.joins_bytes and self._text.endswith(REPLACEMENT_CHARACTER)
        self._final = len(self._text) - is_doubtful
