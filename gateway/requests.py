"""The bodies of requests as pydantic models: what a client may send, checked before anything is made of it.

Every object says which of its keys is unknown; every list and string has a bound. What a refused field may hold is
known to `fields`; ranges of sampling parameters are the coordinator's, whose errors name field, value and limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model, model_validator
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

from specdec.client.request import FIELDS, WORDS
from specdec.gateway.calls import Format
from specdec.gateway.fields import CHAT, COMPLETIONS, SAME_FORM
from specdec.gateway.grammars import ResponseFormat, StructuredOutputs
from specdec.gateway.strict import NAME_LENGTH_MAX, Strict, bounded_json
from specdec.gateway.tools import NamedChoice, Tool, ToolChoice, call_grammar, schemas_of
from specdec.protocol.fields import (
    ALLOWED_TOKEN_IDS_COUNT_MAX,
    BAD_WORDS_COUNT_MAX,
    LOGIT_BIAS_COUNT_MAX,
    MEANINGS,
    N_MAX,
    N_MIN,
    STOP_COUNT_MAX,
    STOP_TOKEN_IDS_COUNT_MAX,
)
from specdec.protocol.limits import LOGPROBS_MAX, UINT32_MAX

PROMPT_COUNT_MAX = 64
MESSAGE_COUNT_MAX = 4096
PART_COUNT_MAX = 1024  # of one message
TOOL_COUNT_MAX = 128
TEXT_LENGTH_MAX = 1 << 22  # of anything: as long as a body
KWARGS_BYTES_MAX = 64 << 10  # of the template's variables
TOOLS_BYTES_MAX = 256 << 10

TokenId = Annotated[int, Field(ge=0, le=UINT32_MAX)]
Count = Annotated[int, Field(ge=0, le=UINT32_MAX)]
Text = Annotated[str, Field(max_length=TEXT_LENGTH_MAX)]
Name = Annotated[str, Field(max_length=NAME_LENGTH_MAX)]


def field_of(wire: Any) -> tuple[Any, Any]:
    """Returns type and default of the field of HTTP for one of gRPC, with its meaning."""
    meaning = MEANINGS[f"{wire.containing_type.name}.{wire.name}"]
    if wire.enum_type and wire.is_repeated:
        words: Any = Literal[*WORDS[wire.name]]
        limit = Field(max_length=len(WORDS[wire.name]), fail_fast=True)
        return Annotated[list[words], limit], Field([], description=meaning)
    numbers = {wire.TYPE_BOOL: bool, wire.TYPE_DOUBLE: float}
    kind: Any = Literal[*WORDS[wire.name]] if wire.enum_type else numbers.get(wire.type, Count)
    return kind | None, Field(None, description=meaning)


if TYPE_CHECKING:
    SpeculativePolicy = Strict
    SamplingParams = Strict
else:
    policy = {name: own for name, own in FIELDS.items() if own.containing_type.name == "SpeculativePolicy"}
    reported = ("report_rounds", "report_statistics")  # as `rounds` and `statistics`
    own_fields = {name: field_of(own) for name, own in policy.items() if name not in reported}
    SpeculativePolicy = create_model("SpeculativePolicy", __base__=Strict, **own_fields)
    own_fields = {name: field_of(own) for name, own in SAME_FORM.items()}
    SamplingParams = create_model("SamplingParams", __base__=Strict, **own_fields)


class StreamOptions(Strict):
    """Parts of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False

    @model_validator(mode="after")
    def _check(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise PydanticCustomError("invalid_value", "continuous_usage_stats needs include_usage: true")
        return self


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text


class Prediction(Strict):
    """Text expected in the answer."""

    type: Literal["content"] = "content"
    content: Text | Annotated[list[TextPart], Field(max_length=PART_COUNT_MAX, fail_fast=True)]

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Speculative(SpeculativePolicy):
    """Speculation of the request, and what the answer says of it: `statistics` at its end, `rounds` with its tokens."""

    statistics: bool = False
    rounds: bool = False


class CalledFunction(Strict):
    """The function of an earlier call; `arguments` is text of JSON."""

    name: Name
    arguments: Text


class ToolCall(Strict):
    """An earlier call."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """A message. The fields that answers of some servers have beside these may be null or empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=PART_COUNT_MAX, fail_fast=True)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=TOOL_COUNT_MAX, fail_fast=True)] | None = None
    tool_call_id: Name | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


def _check_prompt(value: Any) -> Any:
    """Returns a prompt as a list of prompts, each a text or token ids. Bounds come before any walk over a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("invalid_type", "it must be a text, token ids, or a list of some of them")
    prompts = [value] if type(value[0]) is int else value
    if len(prompts) > PROMPT_COUNT_MAX:
        facts = {"size": len(prompts), "limit": PROMPT_COUNT_MAX}
        raise PydanticCustomError("too_long", "it has {size} prompts; at most {limit} are taken", facts)
    for prompt in prompts:
        if isinstance(prompt, list):
            if not all(type(token_id) is int and 0 <= token_id <= UINT32_MAX for token_id in prompt):
                raise PydanticCustomError("invalid_type", "token ids must be integers from 0 to 4294967295")
        elif not isinstance(prompt, str):
            raise PydanticCustomError("invalid_type", "it must be a text, token ids, or a list of some of them")
        if not prompt:
            raise PydanticCustomError("invalid_value", "a prompt is empty; it must have at least one token")
    return prompts


def _check_biases(value: dict[str, float]) -> dict[str, float]:
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key and int(key) <= UINT32_MAX):
            raise PydanticCustomError("invalid_value", 'its keys must be token ids, such as "5"')
    return value


PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": UINT32_MAX}, "minItems": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": PROMPT_COUNT_MAX},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": UINT32_MAX}},
            "minItems": 1,
            "maxItems": PROMPT_COUNT_MAX,
        },
    ]
}
Prompt = Annotated[Any, AfterValidator(_check_prompt), WithJsonSchema(PROMPT_SCHEMA)]
Stops = Annotated[list[Text], Field(max_length=STOP_COUNT_MAX, fail_fast=True)]


Biases = Annotated[dict[str, float], Field(max_length=LOGIT_BIAS_COUNT_MAX), AfterValidator(_check_biases)]


class Generation(SamplingParams):
    """The fields that both endpoints have."""

    model: Name | None = None
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    top_k: Annotated[int, Field(ge=-1, le=UINT32_MAX)] | None = Field(
        None, description=MEANINGS["SamplingParams.top_k"]
    )
    logit_bias: (
        Annotated[dict[str, float], Field(max_length=LOGIT_BIAS_COUNT_MAX), AfterValidator(_check_biases)] | None
    ) = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    n: Annotated[int, Field(ge=N_MIN, le=N_MAX)] = Field(1, description=MEANINGS["SamplingParams.n"])
    stop: Text | Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=STOP_TOKEN_IDS_COUNT_MAX, fail_fast=True)] | None = Field(
        None, description=MEANINGS["SamplingParams.stop_token_ids"]
    )
    bad_words: Annotated[list[Text], Field(max_length=BAD_WORDS_COUNT_MAX, fail_fast=True)] | None = Field(
        None, description=MEANINGS["SamplingParams.bad_words"]
    )
    allowed_token_ids: (
        Annotated[list[TokenId], Field(max_length=ALLOWED_TOKEN_IDS_COUNT_MAX, fail_fast=True)] | None
    ) = Field(None, description=MEANINGS["SamplingParams.allowed_token_ids"])
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    prediction: Prediction | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=NAME_LENGTH_MAX)] | None = None
    speculative: Speculative = Speculative()
    user: Name | None = None
    metadata: Annotated[dict[str, Name], Field(max_length=16)] | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _check(self) -> Generation:
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise PydanticCustomError(
                "invalid_value", "max_tokens and max_completion_tokens must be equal, or one absent"
            )
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("invalid_value", "stream_options needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError("invalid_value", "prompt_logprobs needs stream: false")
        if self.answer_schema is not None and self.structured_outputs is not None:
            raise PydanticCustomError(
                "invalid_value",
                "response_format and structured_outputs exclude each other",
                {"param": "structured_outputs"},
            )
        return self

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The schema of `response_format`."""
        return None if self.response_format is None else self.response_format.answer_schema

    @property
    def grammar(self) -> dict[str, Any] | None:
        """The grammar of the answer without calls; None for any text."""
        if self.structured_outputs is not None:
            return self.structured_outputs.grammar
        return None if self.answer_schema is None else {"json_schema": json.dumps(self.answer_schema)}

    @property
    def output_count_max(self) -> int | None:
        """The most output tokens, by either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_statistics(self) -> bool:
        """Whether the answer tells statistics of the whole text."""
        return not self.stream or self.has_usage or self.speculative.statistics

    @property
    def has_usage_so_far(self) -> bool:
        """Whether every chunk has the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    endpoint = CHAT
    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGE_COUNT_MAX, fail_fast=True)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    tools: (
        Annotated[list[Tool], Field(max_length=TOOL_COUNT_MAX, fail_fast=True), bounded_json(TOOLS_BYTES_MAX)] | None
    ) = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], bounded_json(KWARGS_BYTES_MAX)] | None = None
    reasoning_effort: Name | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("invalid_value", "top_logprobs needs logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError("invalid_value", "continue_final_message excludes add_generation_prompt: true")
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None
        if named is not None and all(tool.function.name != named for tool in self.tools or ()):
            raise PydanticCustomError(
                "invalid_value", "tool_choice names no tool that is given", {"param": "tool_choice"}
            )
        if self.is_call_demanded and not self.tools:
            raise PydanticCustomError("invalid_value", "tool_choice: required needs tools", {"param": "tool_choice"})
        if self.structured_outputs is not None and self.offered_tools:
            raise PydanticCustomError(
                "invalid_value",
                "structured_outputs excludes tools; use response_format",
                {"param": "structured_outputs"},
            )
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def is_call_demanded(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)

    def call_grammar(self, format: Format | None, special_id: Callable[[str], int | None]) -> dict[str, Any] | None:
        """Returns the grammar of the answer with calls in a format; `special_id` finds special tokens by their text.
        Raises HttpError where calls must have a form that is not known."""
        tools, is_demanded, schema = self.offered_tools, self.is_call_demanded, self.answer_schema
        is_strict = any(tool.function.strict for tool in tools)
        if not (is_demanded or is_strict or (tools and schema is not None and format is not None)):
            return self.grammar
        other: Any = "nothing" if is_demanded else "text" if schema is None else schema
        schemas = schemas_of(tools, self.tool_choice)
        is_one = not self.parallel_tool_calls or isinstance(self.tool_choice, NamedChoice)
        return call_grammar(schemas, format, special_id, is_one, other)


class CompletionRequest(Generation):
    """POST /v1/completions."""

    endpoint = COMPLETIONS
    prompt: Prompt
    decoder_prompt: (
        Annotated[Text, Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1, max_length=1 << 20, fail_fast=True)]
        | None
    ) = None
    logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=N_MIN, le=N_MAX)] | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            facts = {"param": "best_of", "n": self.n}
            raise PydanticCustomError("invalid_value", "{param} must be n, {n}: all texts are returned", facts)
        return self


class TokenizeRequest(Strict):
    """POST /tokenize: of a text, or of messages."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MESSAGE_COUNT_MAX, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    tools: (
        Annotated[list[Tool], Field(max_length=TOOL_COUNT_MAX, fail_fast=True), bounded_json(TOOLS_BYTES_MAX)] | None
    ) = None
    chat_template_kwargs: Annotated[dict[str, Any], bounded_json(KWARGS_BYTES_MAX)] | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("invalid_value", "give prompt or messages, one of the two")
        return self


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20, fail_fast=True)]
