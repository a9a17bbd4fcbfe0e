"""A model's own chat template: messages to the prompt's text, as `transformers` renders it.

Templates come with model folders and are not trusted: they run in jinja's sandbox, in a process with bounds of time,
memory and output (`specdec.chat.rendering`), without access to anything but their messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.chat.rendering import CHARACTERS_MAX, RenderingProcess
from specdec.chat.special_tokens import read_present, special_tokens_of
from specdec.errors import ConfigError, ModelRefused
from specdec.folders import has_file, read_text
from specdec.tokenizer_file import whole_tokenizer

if TYPE_CHECKING:
    import tokenizers

# Files with a template, the first of which counts; it goes before that of tokenizer_config.json.
TEMPLATE_FILES = ("additional_chat_templates/default.jinja", "chat_template.jinja")
TEMPLATE_BYTES_MAX = 1 << 20  # known templates have up to 30 kB
Message = Mapping[str, str]  # role and content


class ChatTemplate:
    """The template of a model folder: its source, and the special tokens it may name. `today`: the date it may say;
    None: that of each rendering. Raises ModelRefused for a template that is not valid, ConfigError without jinja2."""

    def __init__(self, folder: Path, source: str, tokens: Mapping[str, str], today: datetime | None = None) -> None:
        self._folder, self._tokens, self._today = folder, tokens, today
        self._process = RenderingProcess(source, f"the chat template of {folder}")
        self._tokenizer: tokenizers.Tokenizer | None = None

    @classmethod
    def read(cls, folder: Path, today: datetime | None = None) -> ChatTemplate | None:
        """Returns the template of a folder; None without one, and without one named `default` among several. Raises
        ModelRefused for one that is not valid, ConfigError without jinja2."""
        source = template_source(folder)
        return None if source is None else cls(folder, source, special_tokens_of(folder), today)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Returns the token ids of the prompt for the next answer, as `apply_chat_template` gives them: the template
        writes the special tokens, so the tokenizer adds none. Raises ConfigError, ModelRefused."""
        if self._tokenizer is None:
            self._tokenizer = whole_tokenizer(self._folder / "tokenizer.json")
        text = self.render(messages)
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        except (TypeError, UnicodeEncodeError):  # of a text with half a surrogate pair, such as standard input's
            raise ConfigError("a message is not UTF-8") from None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Returns the prompt for the next answer. Raises ConfigError for messages that are too long, or that the
        template refuses, ModelRefused for a fault of the template."""
        length = sum(len(message["content"]) for message in messages)
        if length > CHARACTERS_MAX:
            raise ConfigError(f"the conversation has {length} characters; at most {CHARACTERS_MAX} make a prompt")
        own = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        variables = {**self._tokens, **own, "tools": None, "documents": None}
        return self._process.render(variables, (self._today or datetime.now()).isoformat())


def template_source(folder: Path) -> str | None:
    """Returns the template of a folder for chats without tools; None if it has none. Raises ModelRefused."""
    for file in (folder / name for name in TEMPLATE_FILES):
        if has_file(file):
            return read_text(file, TEMPLATE_BYTES_MAX)
    file = folder / "tokenizer_config.json"
    source = read_present(file).get("chat_template")
    if isinstance(source, list):  # several, by name
        named = [entry for entry in source if isinstance(entry, Mapping)]
        source = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        return None
    check_length(file, len(source))
    return source


def check_length(file: Path, length: int) -> None:
    """Raises ModelRefused for a template that is too long to be read."""
    if length > TEMPLATE_BYTES_MAX:
        raise ModelRefused(f"the chat template in {file} has {length} bytes; at most {TEMPLATE_BYTES_MAX} are read")
