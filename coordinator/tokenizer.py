"""Text to token ids and back, with the `tokenizers` library alone.

Special-token rules are the tokenizer file's own, which is what `transformers` follows when the file is there. Decoding
is incremental and holds back bytes that do not form a character.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from specdec.errors import InvalidRequest, ModelRefused
from specdec.protocol.fingerprint import tokenizer_fingerprint

CONTEXT_TOKEN_COUNT = 8  # more than any character takes
REPLACEMENT_CHARACTER = "\ufffd"
BYTES_PER_TOKEN_MAX = 64  # a prompt of more bytes than this per position is refused before it is tokenised


class Tokenizer:
    """The tokenizer of a model folder or hub id. Safe to use from several threads."""

    def __init__(self, path_or_hub_id: str) -> None:
        path = tokenizer_file(path_or_hub_id)
        try:
            source = path.read_text(encoding="utf-8")
        except OSError:
            raise ModelRefused(f"{path} is missing; the coordinator needs the target's tokenizer.json") from None
        try:
            self.fingerprint = tokenizer_fingerprint(json.loads(source))
            self._tokenizer = tokenizers.Tokenizer.from_str(source)
        except Exception as error:  # the library raises bare Exception for a file it cannot read
            raise ModelRefused(f"{path} is not a tokenizer file: {error}") from None

    def encode(self, text: str, positions_max: int) -> tuple[int, ...]:
        """Token ids of a prompt, special tokens added as the file says. Raises InvalidRequest for one far too long."""
        size, limit = len(text.encode("utf-8", "surrogatepass")), positions_max * BYTES_PER_TOKEN_MAX
        if size > limit:
            raise InvalidRequest("prompt.text", f"{size} bytes", f"at most {limit} bytes")
        return tuple(self._tokenizer.encode(text).ids)

    def stream(self, prompt: tuple[int, ...] = ()) -> TextStream:
        """A decoder for the text that continues `prompt`."""
        return TextStream(self._tokenizer, prompt)


def tokenizer_file(path_or_hub_id: str) -> Path:
    """The tokenizer.json of a folder, or of a hub repository. Raises ModelRefused."""
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        return folder / "tokenizer.json"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(path_or_hub_id, "tokenizer.json"))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelRefused(f"{path_or_hub_id}: no such folder, and the model hub did not give it ({reason})") from None


class TextStream:
    """Decodes one text token by token; special tokens have no text. A function of prompt and tokens alone.

    The last tokens of the prompt are its context: some tokenizers drop the space before a text's very first word.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, prompt: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(prompt[-CONTEXT_TOKEN_COUNT:]), skip_special_tokens=True)
        self._uncertain: list[int] = []

    def step(self, token_id: int) -> str:
        """The text that became certain with this token; empty while a character is incomplete."""
        self._uncertain.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # byte tokens that form no character, in tokenizers that decode them all or none
            piece = REPLACEMENT_CHARACTER
            self._stream = DecodeStream(skip_special_tokens=True)
            self._uncertain = [token_id]
            piece += self._stream.step(self._tokenizer, token_id) or ""
        if piece:
            self._uncertain.clear()
        return piece

    def rest(self) -> str:
        """What is left when the text ends here: replacement characters for an incomplete one."""
        return self._tokenizer.decode(self._uncertain, skip_special_tokens=True)
