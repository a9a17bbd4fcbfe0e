"""A model's own chat template: messages to the prompt's text, as `transformers` renders it.

Templates come with model folders and are not trusted: they run in jinja's sandbox, in a process with bounds of time,
memory and output (`specdec.chat.rendering`), without access to anything but what they are given. No template comes with
a request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.chat.messages import Message, cut_to_continue, for_template, in_hermes_form, marked_to_continue, size_of
from specdec.chat.rendering import RenderingProcess
from specdec.chat.special_tokens import NAMES, read_present, special_tokens_of
from specdec.errors import ConfigError, ModelRefused
from specdec.folders import has_file, read_text
from specdec.tokenizer_file import whole_tokenizer

if TYPE_CHECKING:
    import tokenizers

# Files with a template, the first of which counts; it goes before that of tokenizer_config.json.
TEMPLATE_FILES = ("additional_chat_templates/default.jinja", "chat_template.jinja")
TOOLS_FILE, TOOLS_NAME = "additional_chat_templates/tool_use.jinja", "tool_use"  # of one for chats with tools
TEMPLATE_BYTES_MAX = 1 << 20  # known templates have up to 30 kB
RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message", *NAMES}  # that no caller may set
PROBE = "words of a part"
DEVELOPER = re.compile("""["']developer["']""")


class ChatTemplate:
    """The template of a model folder: its source, and the special tokens it may name. `today`: the date it may say;
    None: that of each rendering. `for_tools`: the one for chats with tools, if it is another. Any thread may render.
    Raises ModelRefused for a template that is not valid, ConfigError without jinja2."""

    def __init__(
        self,
        folder: Path,
        source: str,
        tokens: Mapping[str, str],
        today: datetime | None = None,
        for_tools: ChatTemplate | None = None,
    ) -> None:
        self._folder, self._tokens, self._today = folder, tokens, today
        self._name = f"the chat template of {folder}"
        self._process = RenderingProcess(source, self._name)
        self._tokenizer: tokenizers.Tokenizer | None = None
        self.source = source
        self._for_tools = for_tools

    @classmethod
    def read(cls, folder: Path, today: datetime | None = None) -> ChatTemplate | None:
        """Returns the template of a folder; None without one, and without one named `default` among several. Raises
        ModelRefused for one that is not valid, ConfigError without jinja2."""
        source, tools_source = template_sources(folder)
        if source is None:
            return None
        tokens = special_tokens_of(folder)
        for_tools = None if tools_source is None else cls(folder, tools_source, tokens, today)
        return cls(folder, source, tokens, today, for_tools)

    @property
    def for_tools(self) -> ChatTemplate:
        """The template that renders chats with tools."""
        return self._for_tools or self

    @property
    def variables(self) -> frozenset[str]:
        """The names that the template looks up, beside functions that every template has."""
        return self._process.variables

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> tuple[int, ...]:
        """Returns the token ids of what `render` returns, as `apply_chat_template` gives them: the template writes the
        special tokens, so the tokenizer adds none. Raises ConfigError, ModelRefused."""
        if self._tokenizer is None:
            self._tokenizer = whole_tokenizer(self._folder / "tokenizer.json")
        text = self.render(messages, tools, kwargs, add_generation_prompt, continue_final_message)
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        except (TypeError, UnicodeEncodeError):  # of a text with half a surrogate pair, such as standard input's
            raise ConfigError("a message is not UTF-8") from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Returns the prompt for the next answer; without `add_generation_prompt` it does not begin the answer, with
        `continue_final_message` it ends within the last message. `tools`: as programs send them; a template without
        tools gets them in the system message. `kwargs`: more variables, which the template must name.

        Raises ConfigError for messages that are too long or not of their form, for `kwargs` that are reserved or not
        named, and for what the template refuses; ModelRefused for a fault of the template.
        """
        if tools and self._for_tools is not None:
            return self._for_tools.render(messages, tools, kwargs, add_generation_prompt, continue_final_message)
        if add_generation_prompt and continue_final_message:
            raise ConfigError("add_generation_prompt and continue_final_message exclude each other")
        size_of([messages, tools, kwargs])
        self._check_names(kwargs or {})
        taken = for_template(messages, DEVELOPER.search(self.source) is not None, lambda: self._takes_parts)
        if "tools" not in self.variables:
            taken, tools = in_hermes_form(taken, tools), None
        own = {
            "tools": list(tools) if tools else None,
            **(kwargs or {}),
            "add_generation_prompt": add_generation_prompt,
        }
        if not continue_final_message:
            return self._render(taken, own)
        return cut_to_continue(self._render(marked_to_continue(taken), own), taken)

    def _render(self, messages: Sequence[Message], own: Mapping[str, Any]) -> str:
        variables = {"tools": None, "documents": None, **self._tokens, **own, "messages": messages}
        return self._process.render(variables, (self._today or datetime.now()).isoformat())

    def _check_names(self, names: Mapping[str, Any]) -> None:
        for name in names:
            if name in RESERVED or name in self._tokens:
                raise ConfigError(f"template argument {name!r} is reserved")
            if name not in self.variables:
                free = sorted(self.variables - RESERVED - set(self._tokens))
                raise ConfigError(f"template argument {name!r} is not named by {self._name}, which names {free}")

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether content may be a list of parts: a rendering has their words, and no signs of a list around them."""
        asked = [{"role": "user", "content": [{"type": "text", "text": PROBE}]}]
        try:
            text = self._render(asked, {"add_generation_prompt": True})
        except ConfigError:  # or ModelRefused
            return False
        return PROBE in text and f"'{PROBE}'" not in text and f'"{PROBE}"' not in text


def template_sources(folder: Path) -> tuple[str | None, str | None]:
    """Returns the template of a folder for chats, and one for those with tools if it is another; None: it has none.
    Raises ModelRefused."""
    for file in (folder / name for name in TEMPLATE_FILES):
        if has_file(file):
            with_tools = folder / TOOLS_FILE
            tools_source = read_text(with_tools, TEMPLATE_BYTES_MAX) if has_file(with_tools) else None
            return read_text(file, TEMPLATE_BYTES_MAX), tools_source
    file = folder / "tokenizer_config.json"
    source = read_present(file).get("chat_template")
    named = {"default": source}
    if isinstance(source, list):  # several, by name
        named = {str(entry.get("name")): entry.get("template") for entry in source if isinstance(entry, Mapping)}
    found = [named.get(name) if isinstance(named.get(name), str) else None for name in ("default", TOOLS_NAME)]
    for text in filter(None, found):
        check_length(file, len(text))
    return found[0], found[1]


def check_length(file: Path, length: int) -> None:
    """Raises ModelRefused for a template that is too long to be read."""
    if length > TEMPLATE_BYTES_MAX:
        raise ModelRefused(f"the chat template in {file} has {length} bytes; at most {TEMPLATE_BYTES_MAX} are read")
