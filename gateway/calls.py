"""Text of a model to content and tool calls, character by character.

A call is a JSON object with the name of a given tool and, or not, its arguments. In the form of Hermes 2 Pro it stands
between marks, anywhere; in that of Llama 3 it is the whole text, or follows a mark, and others may follow it. All else
is content. What is given out depends on the characters alone, never on their partition into deltas, and is never taken
back: a call is given out when its name and the first character of its arguments are there.

A mark that is a special token of the model has no text: its reader puts SPECIAL_MARK where the token stands.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specdec.gateway.json_object import SPACES, JsonObject, NotJson

if TYPE_CHECKING:
    from specdec.chat.template import ChatTemplate

Format = Literal["hermes", "llama3"]
MARKS: dict[Format, str] = {"hermes": "<tool_call>", "llama3": "<|python_tag|>"}
SPECIAL_MARK = "\ud800"  # no character: no text has it
HERMES_END, LLAMA3_SEPARATOR = "</tool_call>", ";"
ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", "type", "id", *ARGUMENTS)  # of a call; an object that begins with another one is content
HERMES_WORDS = re.compile(r"<tool_call>(?s:.*)name")
OTHER_WORDS = re.compile("<function=|<arg_key>")  # formats of their own between the same marks
LLAMA3_WORDS = re.compile(r"""<\|python_tag\|>|<\|start_header_id\|>(?s:.*)\{"name": """)


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins. `index` counts the calls of a text; `id` is unique."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of a call's arguments: all its parts are the text of a JSON object, or the beginning of one."""

    index: int
    text: str


Event = Content | CallStart | CallArguments


def format_of(template: ChatTemplate) -> Format | None:
    """Returns the format in which a template asks for calls: Hermes for one without tools, which gets them so
    (`specdec.chat`); None for one that is not known here."""
    with_tools = template.for_tools
    if "tools" not in with_tools.variables:
        return "hermes"
    if HERMES_WORDS.search(with_tools.source):
        return None if OTHER_WORDS.search(with_tools.source) else "hermes"
    return "llama3" if LLAMA3_WORDS.search(with_tools.source) else None


class ToolCallParser:
    """The content and calls of one text. `tools`: names of the given tools; `id_prefix`: of the calls' ids, unique
    itself; absent: a random one. `mark_id`: the special token that the format's mark is, None if it is text.
    `call_count`: calls that have begun; `complete_count`: those with all arguments.

    Spaces between calls, and before the first one if nothing else is there, belong to the format.
    """

    def __init__(self, format: Format, tools: Collection[str], id_prefix: str = "", mark_id: int | None = None) -> None:
        self._format: Format = format
        self.mark_id = mark_id
        self._mark = MARKS[format] if mark_id is None else SPECIAL_MARK
        self._tools = frozenset(tools)
        self._id_prefix = id_prefix or f"call_{secrets.token_hex(12)}"
        self._found: list[Event] = []
        self._held = ""  # characters that are not given out, of which `_at` are read
        self._spaces = ""  # before a call, or a part of content
        self._is_bare = True  # no content since the beginning or the last call
        self.call_count = self.complete_count = 0
        self._step: Callable[[], bool] = self._read_text
        if format == "llama3":
            self._begin_object(0)

    def feed(self, text: str) -> list[Event]:
        """Returns what is certain with these characters."""
        self._held += text
        while self._step():
            pass
        return self._given()

    def end(self, finish_reason: str) -> list[Event]:
        """Returns what was held: of a call that has not begun it is content, but for one that `length` cut after its
        name, which begins without arguments. One that has begun stays as it is."""
        if self._step == self._read_object and self._name is not None and finish_reason == "length":
            self._start_call()
        elif self._step in (self._read_text, self._read_object):
            self._say(self._held)
        if self._spaces and not self.call_count:
            self._found.append(Content(self._spaces))
        return self._given()

    def _given(self) -> list[Event]:
        found, self._found = self._found, []
        return found

    def _say(self, text: str) -> None:
        """Gives out content; spaces wait until it is known what follows them."""
        text = text.replace(SPECIAL_MARK, "")
        if self._is_bare:
            text = self._spaces + text
            self._is_bare = not text.strip(SPACES)
            self._spaces = text if self._is_bare else ""
        if not text or self._is_bare:
            return
        if self._found and isinstance(last := self._found[-1], Content):
            self._found[-1] = Content(last.text + text)
        else:
            self._found.append(Content(text))

    def _read_text(self) -> bool:
        """Reads up to a mark; what may be the beginning of one is held. Like the others it returns whether there is
        more to do without further characters."""
        at = self._held.find(self._mark)
        if at < 0:
            lengths = range(min(len(self._mark) - 1, len(self._held)), 0, -1)
            held = next((length for length in lengths if self._held.endswith(self._mark[:length])), 0)
            at = len(self._held) - held
        self._say(self._held[:at])
        self._held = self._held[at:]
        if not self._held.startswith(self._mark):
            return False
        self._begin_object(len(self._mark))
        return True

    def _begin_object(self, mark_length: int) -> None:
        """After a mark of this length an object must come."""
        self._mark_length = self._at = mark_length
        self._json = JsonObject()
        self._key = ""
        self._name: str | None = None
        self._string_at = 0
        self._arguments: tuple[int, int] | None = None  # where they stand, if before the name; the end is 0 within them
        self._step = self._read_object

    def _read_object(self) -> bool:
        """Reads an object until it is certain whether it is a call."""
        for at in range(self._at, len(self._held)):
            try:
                self._see(at)
            except NotJson:
                self._say(self._held[: self._mark_length])  # a mark may stand in the rest
                self._held = self._held[self._mark_length :]
                self._step = self._read_text
            if self._step != self._read_object:
                return True
        self._at = len(self._held)
        return False

    def _see(self, at: int) -> None:
        """Takes a character of an object. Raises NotJson also for one with which it is no call."""
        character, reading = self._held[at], self._json
        place, depth = reading.place, reading.depth
        reading.take(character)
        if reading.depth == 0 and reading.place == "end":
            if self._name is None:
                raise NotJson(character)
            self._start_call()
            self._complete_call("{}", at + 1)
            self._step = self._read_after
        elif depth == 1 and place == "value" and character not in SPACES:
            self._see_value_begin(at)
        elif depth == 2 and reading.depth == 1 and self._arguments is not None and not self._arguments[1]:
            self._arguments = self._arguments[0], at + 1
        elif depth == 1 and place == "string" and reading.place != "string":
            self._see_string_end(at)
        elif depth == 1 and place != "string" and reading.place == "string":
            self._string_at = at

    def _see_value_begin(self, at: int) -> None:
        if self._key == "name" and self._name is None:
            self._string_at = at
            if self._held[at] != '"':
                raise NotJson(self._key)
        elif self._key in ARGUMENTS and self._arguments is None:
            if self._held[at] != "{":
                raise NotJson(self._key)
            self._arguments = at, 0
            if self._name is not None:
                self._start_call()
                self._held, self._at = self._held[at:], 1
                self._step = self._read_arguments

    def _see_string_end(self, at: int) -> None:
        if self._json.is_key:
            self._key = json.loads(self._held[self._string_at : at + 1])
            if self._key not in KEYS:
                raise NotJson(self._key)
        elif self._key == "name" and self._name is None:
            name = json.loads(self._held[self._string_at : at + 1])
            if name not in self._tools:
                raise NotJson(name)
            self._name = name
            if self._arguments is not None:
                begin, end = self._arguments
                self._start_call()
                self._complete_call(self._held[begin:end], at + 1)
                self._step = self._read_rest

    def _start_call(self) -> None:
        assert self._name is not None
        self._spaces, self._is_bare = "", True
        self._found.append(CallStart(self.call_count, f"{self._id_prefix}_{self.call_count}", self._name))
        self.call_count += 1

    def _give_arguments(self, text: str) -> None:
        if text := text.replace(SPECIAL_MARK, ""):
            self._found.append(CallArguments(self.call_count - 1, text))

    def _complete_call(self, arguments: str, end: int) -> None:
        """Gives out the last arguments; of what is held, `end` characters were read."""
        self._give_arguments(arguments)
        self.complete_count += 1
        self._held = self._held[end:]

    def _read_arguments(self) -> bool:
        """Reads arguments of a call that has begun, and gives them out."""
        for at in range(self._at, len(self._held)):
            try:
                self._json.take(self._held[at])
            except NotJson:  # they end here, unfinished
                self._give_arguments(self._held[:at])
                self._held = self._held[at:]
                self._step = self._read_after
                return True
            if self._json.depth == 1:
                self._complete_call(self._held[: at + 1], at + 1)
                self._step = self._read_rest
                return True
        self._give_arguments(self._held)
        self._held, self._at = "", 0
        return False

    def _read_rest(self) -> bool:
        """Reads the rest of the object after its name and arguments, which is not needed."""
        at = 0
        while at < len(self._held) and self._json.depth:
            try:
                self._json.take(self._held[at])
            except NotJson:  # an end was forgotten
                self._step = self._read_after
                break
            at += 1
        self._held = self._held[at:]
        if not self._json.depth:
            self._step = self._read_after
        return self._step == self._read_after

    def _read_after(self) -> bool:
        """Reads what the format has after a call."""
        rest = self._held.lstrip(SPACES)
        if not rest:
            return False
        if self._format == "hermes":
            if rest.startswith(HERMES_END):
                self._held = rest.removeprefix(HERMES_END)
            elif HERMES_END.startswith(rest):
                return False
            self._step = self._read_text
        elif rest[0] in (LLAMA3_SEPARATOR, "{"):
            self._begin_object(len(self._held) - len(rest) + (rest[0] == LLAMA3_SEPARATOR))
        else:
            self._step = self._read_text
        return True
