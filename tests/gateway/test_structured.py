"""Answers of a form through a gateway and running services: objects of a schema, calls that must come."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.gateways import ask, events_of, streamed_texts, whole_text

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Where to?"}]
BODY: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 200, "temperature": 1}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
SEEDS = range(2)


def tool(name: str, **own: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **own}}


def answers(address: str, body: dict[str, Any]) -> list[Any]:
    """The answers of some seeds, each whole, streamed and without speculation: fails unless all three are the same."""
    found = []
    for seed in SEEDS:
        asked = BODY | body | {"seed": seed}
        whole = whole_text(ask(address, CHAT, asked).json["choices"][0])
        plain = whole_text(ask(address, CHAT, asked | {"speculative": {"enabled": False}}).json["choices"][0])
        (streamed,) = streamed_texts(events_of(ask(address, CHAT, asked | {"stream": True}).body))
        said = [(one.text, one.reason, [call["function"] for call in one.calls]) for one in (whole, plain, streamed)]
        assert said[0] == said[1] == said[2]
        found.append(whole)
    return found


def is_valid(text: str) -> bool:
    """Whether a text is JSON of the schema."""
    return Draft202012Validator(SCHEMA).is_valid(json.loads(text))


def test_an_answer_has_its_format(address: str) -> None:
    """Claim: with `response_format` every answer is JSON of the schema, which a model that writes stories would never
    write; the same whole, streamed and without speculation, at temperature 1. Conclusive: checked by `jsonschema`."""
    texts = answers(address, {"response_format": FORMAT})
    assert all(one.reason == "stop" and is_valid(one.text) for one in texts)
    assert len({one.text for one in texts}) == len(SEEDS)
    for one in answers(address, {"response_format": {"type": "json_object"}, "max_tokens": 60}):
        assert one.text.startswith("{") and (one.reason == "length" or isinstance(json.loads(one.text), dict))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}], ids=str)
def test_a_demanded_call_comes(address: str, choice: Any) -> None:
    """Claim: with `tool_choice` required, or a name, every answer is a call of such a tool with arguments of its schema
    and no other text, and ends as a call does. Conclusive: the model has never seen a call."""
    body = {"tools": [tool("go"), tool("stay")], "tool_choice": choice, "parallel_tool_calls": False}
    for one in answers(address, body):
        (call,) = one.calls
        assert one.reason == "tool_calls" and not one.text
        assert call["function"]["name"] in (("go", "stay") if choice == "required" else ("go",))
        assert is_valid(call["function"]["arguments"])


def test_strict_tools_leave_the_text_free(address: str) -> None:
    """Claim: beside a strict tool an answer may still be any text. Conclusive: the model writes no calls by itself; its
    text goes on to the limit."""
    for one in answers(address, {"tools": [tool("go", strict=True)], "max_tokens": 24}):
        assert one.text and not one.calls and one.reason == "length"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no", "no idea"]}, "yes|no|no idea"),
        ({"grammar": 'start: "x" ("," "x")*'}, "x(,x)*"),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"json": SCHEMA, "disable_any_whitespace": False}, r"\s*\{.*\}\s*"),
    ],
    ids=str,
)
def test_structured_outputs_of_completions(address: str, form: dict[str, Any], pattern: str) -> None:
    """Claim: each form of `structured_outputs` holds on completions. Conclusive: two seeds, the whole text compared
    with an expression of its own."""
    for seed in SEEDS:
        body = {"prompt": "Once upon", "max_tokens": 100, "seed": seed, "structured_outputs": form}
        choice = ask(address, COMPLETIONS, body).json["choices"][0]
        assert choice["finish_reason"] == "length" or re.fullmatch(pattern, choice["text"], re.S), choice


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "a"),
        ({"regex": "(?=a)b"}, "look"),
        ({"grammar": "start: missing"}, "missing"),
        ({"json": '{"type": '}, "JSON"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused(address: str, form: dict[str, Any], words: str) -> None:
    """Claim: a form that the service cannot follow exactly is 400, names the grammar's field and says why."""
    body = {"prompt": "x", "structured_outputs": form}
    error = ask(address, COMPLETIONS, body)
    assert error.status == 400 and words in error.error["message"], error.body
    assert error.error["param"].startswith("grammar"), error.error


def test_a_form_and_no_end_tokens_contradict(address: str) -> None:
    """Claim: `ignore_eos` with a form is refused by its name: the text could not end."""
    body = {"prompt": "x", "structured_outputs": {"regex": "a"}, "ignore_eos": True}
    answer = ask(address, COMPLETIONS, body)
    assert answer.status == 400 and answer.error["param"] == "ignore_eos", answer.body
