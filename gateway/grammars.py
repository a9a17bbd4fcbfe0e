"""Structured output over HTTP as a grammar of gRPC: `response_format` and `structured_outputs`.

A text may have one grammar only. With tools (`tools`), an answer in a format is that or calls.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from specdec.gateway.strict import NAME_LENGTH_MAX, Strict, bounded_json

SCHEMA_BYTES_MAX = 64 << 10  # as the coordinator has it, for a whole grammar
SCHEMA_DEPTH_MAX = 128  # of lists and objects; the coordinator's limit is in levels of the schema
CHOICE_COUNT_MAX = 1024
ANY_OBJECT: dict[str, Any] = {"type": "object"}

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
