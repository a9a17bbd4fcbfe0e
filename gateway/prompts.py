"""Messages and texts to token ids, and ids to the strings and bytes that log-probabilities show; beside the event loop.

A model folder's tokenizer and chat template are read once. The library gives up the interpreter's lock for a batch
only, so a text is tokenised as a batch of one; the template renders in its own process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from specdec.chat.special_tokens import read_present, special_tokens_of
from specdec.chat.template import RESERVED, ChatTemplate
from specdec.errors import ConfigError, ModelRefused
from specdec.folders import TOKENIZER_BYTES_MAX, described_folder, parse_json, read_text
from specdec.gateway.errors import CONTEXT_LENGTH, HttpError
from specdec.protocol.fingerprint import check_tokens, tokenizer_fingerprint
from specdec.tokenizer_file import whole_tokenizer

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "config.json",
    "generation_config.json",
)
BYTES_PER_TOKEN_MAX = 64  # a text of more bytes than this per position is refused before it is tokenised
NAME_LENGTH_MAX = 128  # of a variable's name in an error
REASONING_EFFORT = "reasoning_effort"  # a field of a request, which only a template may know
PIECE_COUNT_KEPT = 1 << 15
WORKER_COUNT = 2  # of threads that tokenise: a long text takes tens of megabytes, which each thread keeps
Result = TypeVar("Result")
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of generation_config.json


def model_folder(model: str) -> Path:
    """Returns the folder with a model's tokenizer: for a GGUF file it is made, for a hub id its files are fetched.
    Raises ModelRefused."""
    folder = described_folder(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=list(FILES)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelRefused(f"{model}: no such folder, and the model hub did not give it ({reason})") from None


def bytes_of_letters() -> dict[str, int]:
    """Returns the byte of each letter of byte-level tokenizers: printable bytes are themselves, the others follow from
    U+0100 on (Radford et al. 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


LETTERS = bytes_of_letters()


def check_length(text: str, positions_max: int, param: str) -> None:
    """Raises HttpError for a text that cannot fit the model, whatever its tokens are."""
    limit = positions_max * BYTES_PER_TOKEN_MAX
    size = len(text) if len(text) > limit else len(text.encode("utf-8", "replace"))
    if size > limit:
        sentence = (
            f"This model's maximum context length is {positions_max} tokens. However, your {param} has {size} bytes or "
            f"more; at most {limit} are read. Please reduce its length."
        )
        raise HttpError(400, sentence, CONTEXT_LENGTH, param)


class Prompts:
    """The tokenizer and the chat template of a model folder; `template` is None where it has none. Raises ModelRefused
    for files that cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / "tokenizer.json"
        content = parse_json(file, read_text(file, TOKENIZER_BYTES_MAX))
        check_tokens(str(file), content)
        self.fingerprint = tokenizer_fingerprint(content)
        self._is_byte_level = "ByteLevel" in json.dumps(content.get("decoder") or {})
        del content  # of a large vocabulary it takes as much memory as the tokenizer
        self._tokenizer = whole_tokenizer(file)
        self.template = ChatTemplate.read(folder)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = {token.content: token_id for token_id, token in added.items() if token.special}
        self.piece = lru_cache(PIECE_COUNT_KEPT)(self._piece)
        self._workers = ThreadPoolExecutor(WORKER_COUNT, "prompts")

    def special_id(self, text: str) -> int | None:
        """Returns the id of the special token with this text; it has no text in an answer, so as a stop it is an id."""
        return self._special.get(text)

    async def encode(self, text: str, positions_max: int, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text. Raises HttpError for one far too long for the model."""
        check_length(text, positions_max, "prompt")
        return await self._beside(self._encode, text, add_special_tokens)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        positions_max: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Returns the ids of a conversation by the model's template. Raises HttpError without one, for a template
        argument that it does not name, and for messages that it refuses."""
        if self.template is None:
            raise HttpError(
                400, "this model has no chat template; use /v1/completions", "unsupported_endpoint", "messages"
            )
        named = self.template.for_tools if tools else self.template
        for name in kwargs or {}:
            if name in RESERVED or name not in named.variables:
                field = name if name == REASONING_EFFORT else f"chat_template_kwargs.{name[:NAME_LENGTH_MAX]}"
                sentence = f"{field} is not a variable of this model's chat template"
                raise HttpError(400, sentence, "unknown_parameter", field)
        arguments = messages, tools, kwargs, add_generation_prompt, continue_final_message
        return await self._beside(self._encode_chat, self.template, arguments, positions_max)

    def _encode_chat(self, template: ChatTemplate, arguments: tuple[Any, ...], positions_max: int) -> list[int]:
        try:
            text = template.render(*arguments)
        except ModelRefused as error:
            raise HttpError(500, str(error), "template_error") from None
        except ConfigError as error:
            raise HttpError(400, str(error), "invalid_value", "messages") from None
        check_length(text, positions_max, "messages")
        return self._encode(text, False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    async def _beside(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *arguments)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of some ids, special tokens included."""
        return await self._beside(partial(self._tokenizer.decode, list(token_ids), skip_special_tokens=False))

    def _piece(self, token_id: int) -> tuple[str, bytes]:
        """Returns the string and the bytes that a token stands for; the string of a part of a character is U+FFFD."""
        added = self._added.get(token_id)
        if added is not None:
            return added, added.encode()
        letters = self._tokenizer.id_to_token(token_id) or ""
        if self._is_byte_level:
            data = bytes(LETTERS[letter] for letter in letters if letter in LETTERS)
        elif len(letters) == 6 and letters.startswith("<0x") and letters.endswith(">"):
            data = bytes.fromhex(letters[3:5])
        else:
            data = letters.replace("▁", " ").encode("utf-8", "replace")
        return data.decode("utf-8", "replace"), data

    def info(self) -> dict[str, Any]:
        """Returns what `/tokenizer_info` answers: the folder's own configuration, special tokens, template."""
        own = read_present(self.folder / "tokenizer_config.json") | special_tokens_of(self.folder)
        own.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        if self.template is not None:
            own["chat_template"] = self.template.source
        return own

    def sampling_defaults(self) -> dict[str, Any]:
        """Returns the sampling parameters of the folder's generation_config.json that a request has too."""
        own = read_present(self.folder / "generation_config.json")
        if own.get("do_sample") is False:
            return {"temperature": 0.0}
        return {name: own[name] for name in SAMPLING_DEFAULTS if isinstance(own.get(name), (int, float))}
