"""Structured output over HTTP as a grammar of gRPC: `response_format`, `structured_outputs`, and calls that must come.

A text may have one grammar only. With tools, an answer in a format is that or calls. Which text is a call is the
model's format (`calls`); under a grammar calls are compact JSON, the name before the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from specdec.gateway.calls import HERMES_END, LLAMA3_SEPARATOR, MARKS, Format
from specdec.gateway.errors import HttpError
from specdec.gateway.strict import NAME_LENGTH_MAX, Strict, bounded_json

SCHEMA_BYTES_MAX = 64 << 10  # as the coordinator has it, for a whole grammar
SCHEMA_DEPTH_MAX = 128  # of lists and objects; the coordinator's limit is in levels of the schema
CHOICE_COUNT_MAX = 1024
ANY_OBJECT: dict[str, Any] = {"type": "object"}
COMPACT = {
    "x-guidance": {
        "whitespace_flexible": False,
        "item_separator": ",",
        "key_separator": ":",
        "lenient": False,
        "coerce_one_of": False,
    }
}

JsonSchema = Annotated[dict[str, Any] | bool, bounded_json(SCHEMA_BYTES_MAX, SCHEMA_DEPTH_MAX)]
Text = Annotated[str, Field(max_length=SCHEMA_BYTES_MAX)]


class NamedSchema(Strict):
    """A schema as OpenAI has it. It is always kept to, so `strict` changes nothing."""

    name: Annotated[str, Field(max_length=NAME_LENGTH_MAX)] | None = None
    description: Text | None = None
    schema_: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise PydanticCustomError("invalid_value", "json_schema belongs to the type json_schema, and must be there")
        return self

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The schema of an answer; None for any text."""
        if self.type == "text":
            return None
        named = self.json_schema
        schema = ANY_OBJECT if named is None or named.schema_ is None else named.schema_
        return schema if isinstance(schema, dict) else {} if schema else {"not": {}}


class StructuredOutputs(Strict):
    """The form of an answer as vLLM has it: one of the first five."""

    json_: JsonSchema | Text | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=CHOICE_COUNT_MAX, fail_fast=True)] | None = None
    grammar_: Text | None = Field(None, alias="grammar")
    disable_any_whitespace: bool = True

    @model_validator(mode="after")
    def _check(self) -> StructuredOutputs:
        kinds = self.json_, self.json_object or None, self.regex, self.choice, self.grammar_
        if sum(kind is not None for kind in kinds) != 1:
            raise PydanticCustomError("invalid_value", "it must have one of json, json_object, regex, choice, grammar")
        return self

    @property
    def grammar(self) -> dict[str, Any]:
        """The grammar."""
        spaces = {} if self.disable_any_whitespace else {"allow_whitespace": True}
        if self.json_ is not None:
            return {"json_schema": self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)} | spaces
        if self.json_object:
            return {"json_object": True} | spaces
        if self.regex is not None:
            return {"regex": self.regex}
        return {"lark": self.grammar_} if self.choice is None else {"choice": self.choice}


class NamedFunction(Strict):
    """The tool that must be called."""

    name: Annotated[str, Field(min_length=1, max_length=NAME_LENGTH_MAX)]


class NamedChoice(Strict):
    """A call of one tool."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["auto", "none", "required"] | NamedChoice


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
    bodies = [object_of({"name": {"const": name}, arguments: schema}) for name, schema in schemas.items()]
    body = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
    lines = [f"body: %json {json.dumps(body | COMPACT)}"]
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
        return "\n".join([f"start: {calls} | answer", f"answer: %json {json.dumps(other | COMPACT)}", *lines])
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


def object_of(members: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of an object of these members, all of them."""
    return {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}
