"""Tools of a chat, and the grammar of an answer that calls them.

Which text is a call is the model's format (`calls`); under a grammar calls are compact JSON, the name before the
arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from specdec.gateway.calls import HERMES_END, LLAMA3_SEPARATOR, MARKS, Format
from specdec.gateway.errors import HttpError
from specdec.gateway.grammars import ANY_OBJECT, Text
from specdec.gateway.strict import NAME_LENGTH_MAX, Strict
from specdec.grammar.texts import options


class Function(Strict):
    """A function that may be called; `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=NAME_LENGTH_MAX)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The tool that must be called."""

    name: Annotated[str, Field(min_length=1, max_length=NAME_LENGTH_MAX)]


class NamedChoice(Strict):
    """A call of one tool."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["auto", "none", "required"] | NamedChoice


def schemas_of(tools: Iterable[Tool], choice: ToolChoice | None) -> dict[str, Any]:
    """Returns the schema of each tool's arguments that an answer may call; any object for one that is neither demanded
    nor strict."""
    named = choice.function.name if isinstance(choice, NamedChoice) else None
    is_demanded = named is not None or choice == "required"
    return {
        own.name: own.parameters if own.parameters is not None and (is_demanded or own.strict) else ANY_OBJECT
        for own in (tool.function for tool in tools)
        if named in (None, own.name)
    }


def call_grammar(
    schemas: dict[str, Any],
    format: Format | None,
    special_id: Callable[[str], int | None],
    is_one: bool,
    other: Literal["nothing", "text"] | dict[str, Any],
) -> dict[str, Any]:
    """Returns the grammar of answers that are calls of these tools, or what `other` says (`calls_lark`). Raises
    HttpError where the form of the model's calls is not known."""
    if format is None:
        sentence = "the form of this model's calls is not known, so none can be demanded; see --tool-call-format"
        raise HttpError(400, sentence, "unsupported_parameter", "tool_choice")
    return {"lark": calls_lark(format, schemas, special_id, is_one, other)}


def calls_lark(
    format: Format,
    schemas: dict[str, Any],
    special_id: Callable[[str], int | None],
    is_one: bool,
    other: Literal["nothing", "text"] | dict[str, Any],
) -> str:
    """Returns a Lark grammar of calls of tools: `schemas` has that of each one's arguments by its name. `special_id`
    finds a mark among the model's special tokens; `is_one`: one call at most; `other`: what else an answer may be, a
    dictionary for JSON of that schema."""
    arguments = "arguments" if format == "hermes" else "parameters"
    lines = ["body: " + " | ".join(f"body_{number}" for number in range(len(schemas)))]
    for number, (name, schema) in enumerate(schemas.items()):  # each a document of its own, which "#" in it names
        named = json.dumps(json.dumps(name, ensure_ascii=False))
        start = f'"{{" "\\"name\\"" ":" {named} "," "\\"{arguments}\\"" ":"'  # the parts that the library has in JSON
        lines.append(f'body_{number}: {start} arguments_{number} "}}"')
        lines.append(f"arguments_{number}: %json {json.dumps(schema | options())}")
    more = "" if is_one else {"hermes": r" (/\n?/ call)*", "llama3": f' ("{LLAMA3_SEPARATOR}" call)*'}[format]
    calls = f"call{more}"
    if format == "llama3":
        lines.append("call: body")
    else:
        begin, end = (symbol_of(mark, special_id) for mark in (MARKS[format], HERMES_END))
        lines.append(f'call: {begin} "\\n" body "\\n" {end}')
    if other == "nothing":
        return "\n".join([f"start: {calls}", *lines])
    if isinstance(other, dict):
        return "\n".join([f"start: {calls} | answer", f"answer: %json {json.dumps(other | options())}", *lines])
    return "\n".join([*free_text(format, special_id, is_one), *lines])


def free_text(format: Format, special_id: Callable[[str], int | None], is_one: bool) -> Iterable[str]:
    """The rules of any text with calls in it where the format has them."""
    mark_id = special_id(MARKS[format])
    if format == "llama3":  # the whole text, or after the mark
        yield f"start: {f'<[{mark_id}]>? ' if mark_id is not None else ''}calls | TEXT?"
        yield "calls: call" if is_one else f'calls: call ("{LLAMA3_SEPARATOR}" call)*'
        yield r"TEXT: /[^{](?s:.*)/"
    elif mark_id is not None:
        yield f"start: TEXT? (call TEXT?){'?' if is_one else '*'}"
        yield "TEXT: /(?s:.+)/"
    else:
        mark = MARKS[format]
        yield rf"start: (lead /\n?/ body /\n?/ {symbol_of(HERMES_END, special_id)}){'?' if is_one else '*'} TEXT?"
        yield f'lead[suffix="{mark}"]: /(?s:.*)/'
        yield f"TEXT: /(?s:.+)/ & ~/(?s:.*){mark}(?s:.*)/"


def symbol_of(mark: str, special_id: Callable[[str], int | None]) -> str:
    """Returns a mark in Lark: a special token by its id, or its text."""
    mark_id = special_id(mark)
    return json.dumps(mark) if mark_id is None else f"<[{mark_id}]>"
