"""Grammars of calls: what they accept is read as calls, in each form of calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from specdec.folders import EMBEDDED_MODELS
from specdec.gateway.calls import CallArguments, CallStart, Content, ToolCallParser
from specdec.gateway.errors import HttpError
from specdec.gateway.requests import ChatRequest
from specdec.gateway.strict import read_body
from specdec.gateway.tools import call_grammar

MARK = 5  # stands for a special token that is a mark of calls
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = {"look": SCHEMA, "wait": {"type": "object"}}
LOOK, WAIT = ('{"name":"look","%s":{"city":"Bern"}}', '{"name":"wait","%s":{"s":[1,2]}}')
ANSWER = {"type": "object", "properties": {"done": {"type": "boolean"}}, "required": ["done"]}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    """The embedded target's."""
    return LLTokenizer(str(EMBEDDED_MODELS / "target" / "tokenizer.json"))


def is_accepted(tokenizer: LLTokenizer, lark: str, parts: list[str | int]) -> bool:
    """Whether a text is one of the grammar; a number stands for a special token."""
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark))
    assert not matcher.get_error(), matcher.get_error()
    token_ids = [one for part in parts for one in ([part] if isinstance(part, int) else tokenizer.tokenize_str(part))]
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def written(format: str, bodies: list[str]) -> str:
    """Calls as a model writes them."""
    if format == "llama3":
        return ";".join(body % "parameters" for body in bodies)
    return "\n".join(f"<tool_call>\n{body % 'arguments'}\n</tool_call>" for body in bodies)


@pytest.mark.parametrize("format", ["hermes", "llama3"])
@pytest.mark.parametrize("is_one", [False, True])
@pytest.mark.parametrize("other", ["nothing", "text", ANSWER], ids=["demanded", "strict", "or an answer"])
def test_what_a_grammar_of_calls_accepts_is_read_as_calls(
    tokenizer: LLTokenizer, format: Any, is_one: bool, other: Any
) -> None:
    """Claim: a grammar of calls accepts a call of each tool, and two unless one is wanted; none of an unknown tool or
    with arguments against its schema; free text, or the answer, only where it may come. What it accepts the gateway's
    own reader reads as these calls.

    Conclusive: the grammar is compiled by the library that decodes, and walked over the text's tokens to its end.
    """
    lark = call_grammar(TOOLS, format, lambda text: None, is_one, other)["lark"]
    for bodies in ([LOOK], [WAIT], [LOOK, WAIT]):
        text = written(format, bodies)
        assert is_accepted(tokenizer, lark, [text]) is (len(bodies) == 1 or not is_one), text
        reader = ToolCallParser(format, TOOLS)
        events = [*reader.feed(text), *reader.end("stop")]
        assert [one.name for one in events if isinstance(one, CallStart)] == [
            "look" if body is LOOK else "wait" for body in bodies
        ]
        assert not [one for one in events if isinstance(one, Content) and one.text.strip()]
        arguments = "".join(one.text for one in events if isinstance(one, CallArguments) and one.index == 0)
        assert json.loads(arguments) == ({"city": "Bern"} if bodies[0] is LOOK else {"s": [1, 2]})
    for wrong in (LOOK.replace("look", "fly"), LOOK.replace("city", "town"), LOOK.replace('"Bern"', "7")):
        assert not is_accepted(tokenizer, lark, [written(format, [wrong])])
    for text in ("Hello.\n<b>", ""):
        assert is_accepted(tokenizer, lark, [text]) is (other == "text")
    assert is_accepted(tokenizer, lark, ['{"done":true}']) is (other == ANSWER or (other, format) == ("text", "hermes"))
    if other == "text" and format == "hermes":
        assert is_accepted(tokenizer, lark, [f"I look. <tool_cal {written(format, [LOOK])} done"])


def test_a_mark_that_is_a_special_token_is_that_token(tokenizer: LLTokenizer) -> None:
    """Claim: where the form's mark is a special token, calls begin with this token, and its text is no call."""
    demanded = call_grammar(TOOLS, "hermes", {"<tool_call>": MARK}.get, False, "nothing")["lark"]
    strict = call_grammar(TOOLS, "hermes", {"<tool_call>": MARK}.get, False, "text")["lark"]
    for lark in (demanded, strict):
        assert is_accepted(tokenizer, lark, [MARK, f"\n{LOOK % 'arguments'}\n</tool_call>"])
        assert is_accepted(tokenizer, lark, [written("hermes", [LOOK])]) is (lark == strict)


@pytest.mark.parametrize("format", ["hermes", "llama3"])
def test_references_are_within_the_arguments_of_their_tool(tokenizer: LLTokenizer, format: Any) -> None:
    """Claim: `#` in the schema of a tool's arguments is that schema, as `pydantic` writes it, beside any other tool.
    Conclusive: arguments that follow a definition, the root and a part are accepted, and others not."""
    hall = {"type": "object", "properties": {"size": {"type": "integer"}, "next": {"$ref": "#"}}}
    hall |= {"required": ["size"], "additionalProperties": False}
    house = {
        "type": "object",
        "properties": {"door": {"$ref": "#/$defs/door"}, "other": {"$ref": "#/properties/door"}},
        "required": ["door", "other"],
        "additionalProperties": False,
        "$defs": {"door": {"enum": ["open", "shut"]}},
    }
    lark = call_grammar({"hall": hall, "house": house}, format, lambda text: None, True, "nothing")["lark"]
    right = ['"hall","%s":{"size":1,"next":{"size":2}}}', '"house","%s":{"door":"shut","other":"open"}}']
    wrong = ['"hall","%s":{"size":1,"next":{"name":"hall"}}}', '"house","%s":{"door":"shut","other":"green"}}']
    for body in (*right, *wrong):
        text = written(format, [f'{{"name":{body}'])
        assert is_accepted(tokenizer, lark, [text]) is (body in right), text


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def tool(name: str, schema: dict[str, Any] | None = None, **own: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **own}}


def grammar_of(**own: Any) -> dict[str, Any] | None:
    """The grammar of a chat request with these fields, whose model calls in the form of Hermes."""
    body = read_body(ChatRequest, json.dumps(CHAT | own).encode())
    return body.call_grammar("hermes", lambda text: None)


def test_which_grammar_a_request_has() -> None:
    """Claim: each field that asks for a form of the answer becomes the grammar of gRPC that says the same; a request
    without one has none. Conclusive: all fields, with their variants."""
    tools = [tool("look", SCHEMA), tool("wait")]
    assert grammar_of() == grammar_of(tools=tools) == grammar_of(response_format={"type": "text"}) is None
    assert grammar_of(response_format={"type": "json_object"}) == {"json_schema": '{"type": "object"}'}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    assert grammar_of(response_format=named) == {"json_schema": json.dumps(SCHEMA)}
    assert grammar_of(structured_outputs={"json": SCHEMA}) == {"json_schema": json.dumps(SCHEMA)}
    spaced = {"json_object": True, "disable_any_whitespace": False}
    assert grammar_of(structured_outputs=spaced) == {"json_object": True, "allow_whitespace": True}
    assert grammar_of(structured_outputs={"regex": "a+"}) == {"regex": "a+"}
    assert grammar_of(structured_outputs={"choice": ["a", "b"]}) == {"choice": ["a", "b"]}
    assert grammar_of(structured_outputs={"grammar": 'start: "a"'}) == {"lark": 'start: "a"'}
    one = {"type": "function", "function": {"name": "look"}}
    expected = call_grammar({"look": SCHEMA}, "hermes", lambda text: None, True, "nothing")
    assert grammar_of(tools=tools, tool_choice=one) == expected
    expected = call_grammar({"look": SCHEMA, "wait": {"type": "object"}}, "hermes", lambda text: None, False, "nothing")
    assert grammar_of(tools=tools, tool_choice="required") == expected
    strict = [tool("look", SCHEMA, strict=True), tool("wait", SCHEMA)]
    expected = call_grammar({"look": SCHEMA, "wait": {"type": "object"}}, "hermes", lambda text: None, False, "text")
    assert grammar_of(tools=strict) == expected
    assert grammar_of(tools=strict, tool_choice="none") is None
    expected = call_grammar(
        {"look": {"type": "object"}, "wait": {"type": "object"}}, "hermes", lambda text: None, False, SCHEMA
    )
    assert grammar_of(tools=tools, response_format=named) == expected


@pytest.mark.parametrize(
    "own, param",
    [
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a"}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}, "tools": [tool("look")]}, "tool_choice"),
        ({"tools": [tool("look")], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tool_choice": "any", "tools": [tool("look")]}, "tool_choice"),
        ({"guided_json": SCHEMA}, "guided_json"),
    ],
    ids=str,
)
def test_what_no_grammar_can_be_is_refused(own: dict[str, Any], param: str | None) -> None:
    """Claim: contradictions and unknown forms are 400 and name their field. Conclusive: each way to contradict."""
    with pytest.raises(HttpError) as refused:
        grammar_of(**own)
    assert refused.value.status == 400 and refused.value.param == param, refused.value.message


def test_calls_of_an_unknown_form_cannot_be_demanded() -> None:
    """Claim: where the form of a model's calls is not known, a demanded call is 400 and says what to do."""
    body = read_body(ChatRequest, json.dumps(CHAT | {"tools": [tool("look")], "tool_choice": "required"}).encode())
    with pytest.raises(HttpError, match="--tool-call-format"):
        body.call_grammar(None, lambda text: None)
