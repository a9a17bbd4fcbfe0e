"""Text to token ids and back, with the `tokenizers` library alone.

Special-token rules are the tokenizer file's own, as in `transformers` if the file exists; its `truncation` and
`padding` do not apply. Decoding is incremental and holds back bytes that do not form a character.
"""

from __future__ import annotations

import tokenizers
from tokenizers.decoders import DecodeStream

from specdec.errors import InvalidRequest, ModelRefused, refusing
from specdec.folders import TOKENIZER_BYTES_MAX, has_file, parse_json, read_text, tokenizer_file
from specdec.protocol.fingerprint import check_tokens, tokenizer_fingerprint

CONTEXT_TOKEN_COUNT = 8  # more than any character has
UNCERTAIN_TOKEN_COUNT_MAX = 16  # held back without a character: each further token decodes all of them again
REPLACEMENT_CHARACTER = "\ufffd"
BYTES_PER_TOKEN_MAX = 64  # a prompt of more bytes than this per position is refused before it is tokenised


class Tokenizer:
    """The tokenizer of a model folder or hub id. Safe to use from several threads."""

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
        return TextStream(self._tokenizer, prompt)


class TextStream:
    """Decodes one text token by token; special tokens have no text. A function of prompt and tokens alone.

    The last tokens of the prompt are its context: some tokenizers drop the space before a text's very first word.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, prompt: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt[-CONTEXT_TOKEN_COUNT:])  # tokens whose text is final, decoded with the next ones
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=True)
        self._uncertain: list[int] = []

    def step(self, token_id: int) -> str:
        """Returns the text that became final with this token; empty while a character is incomplete."""
        self._uncertain.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # byte tokens that form no character, in tokenizers that decode them all or none
            self._stream, self._uncertain = DecodeStream(skip_special_tokens=True), []
            return REPLACEMENT_CHARACTER + self.step(token_id)
        if piece:
            self._context, self._uncertain = self._uncertain, []
        elif len(self._uncertain) == UNCERTAIN_TOKEN_COUNT_MAX:
            piece = self._cut()
        return piece

    def _cut(self) -> str:
        """Returns the text of the uncertain tokens before the last place where it can be cut without a change: a
        character that is not complete yet stays whole. Without such a place no token stays uncertain."""
        whole = self._uncertain
        places = (place for place in range(len(whole) - 1, 0, -1) if self._can_cut(whole, place))
        place = next(places, len(whole))
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=True)
        self._uncertain = []
        return self._decode(whole[:place]) + "".join(map(self.step, whole[place:]))

    def _can_cut(self, token_ids: list[int], place: int) -> bool:
        before, after = self._decode(token_ids[:place]), self._decode(token_ids[place:])
        return bool(after) and before + after == self._decode(token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def rest(self) -> str:
        """Returns the rest of a text that ends here: replacement characters for an incomplete one."""
        return self._decode(self._uncertain)
