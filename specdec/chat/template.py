"""A model's own chat template: messages to the prompt's text, as `transformers` renders it.

Templates come with model folders and are not trusted: they run in jinja's sandbox, without access to anything but their
messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from specdec.engine.retokenizer import whole_tokenizer
from specdec.errors import ConfigError
from specdec.folders import has_file, read_json, read_text

if TYPE_CHECKING:
    import tokenizers

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # that `transformers` lets a template name
Message = Mapping[str, str]  # role and content


class ChatTemplate:
    """The template of a model folder: its source, and the special tokens it may name. `today`: the date it may say;
    None: that of each rendering."""

    def __init__(self, folder: Path, source: str, tokens: Mapping[str, str], today: datetime | None = None) -> None:
        self._folder, self._tokens = folder, tokens
        self._template = compiled(source, today)
        self._tokenizer: tokenizers.Tokenizer | None = None

    @classmethod
    def read(cls, folder: Path, today: datetime | None = None) -> ChatTemplate | None:
        """Returns the template of a folder; None without one. Raises ConfigError for one that is not valid, or without
        jinja2."""
        file, template = folder / "tokenizer_config.json", folder / TEMPLATE_FILE
        config = read_json(file) if has_file(file) else {}
        source = config.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = [entry for entry in source if isinstance(entry, Mapping) and entry.get("name") == "default"]
            source = named[0].get("template") if named else None
        if has_file(template):
            source = read_text(template)
        tokens = {f"{name}_token": token_text(config.get(f"{name}_token")) for name in SPECIAL_TOKENS}
        return cls(folder, source, tokens, today) if isinstance(source, str) else None

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Returns the token ids of the prompt for the next answer, as `apply_chat_template` gives them: the template
        writes the special tokens, so the tokenizer adds none. Raises ConfigError, ModelRefused."""
        if self._tokenizer is None:
            self._tokenizer = whole_tokenizer(self._folder / "tokenizer.json")
        try:
            return tuple(self._tokenizer.encode(self.render(messages), add_special_tokens=False).ids)
        except (TypeError, UnicodeEncodeError):  # of a text with half a surrogate pair, such as standard input's
            raise ConfigError("a message is not UTF-8") from None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Returns the prompt for the next answer. Raises ConfigError for messages the template refuses."""
        try:
            return str(
                self._template.render(
                    messages=list(messages),
                    add_generation_prompt=add_generation_prompt,
                    tools=None,
                    documents=None,
                    **self._tokens,
                )
            )
        except Exception as error:  # a template raises what it likes
            raise ConfigError(f"the chat template of {self._folder} refuses these messages: {error}") from None


def token_text(token: Any) -> str:
    """The text of a special token, given as such or with its properties; empty if there is none."""
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token or "")


def compiled(source: str, today: datetime | None = None) -> Any:
    """Returns a jinja template with the settings and functions that templates of `transformers` expect."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ConfigError("chat templates need jinja2: pip install jinja2") from None

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here they are words like others."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: (today or datetime.now()).strftime(format)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(f"the chat template is not valid: {error}") from None
