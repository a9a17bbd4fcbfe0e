"""Tool calls from a model's text to the client, and the template's arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.gateways import Text, ask, events_of, gateway, scripted_models, streamed_texts, whole_text
from tests.support.services import running

PATH = "/v1/chat/completions"
PIECES = [
    "Let me look. ",
    "<tool",
    '_call>\n{"name": "lo',
    'ok", "arguments": {"where": "a } b", "n',
    '": [1, {"x": 2}]',
    "}",
    "}\n</tool_call>\n<tool_call>",
    '{"name": "stop", "arguments": {}}',
    "\n</tool_call>",
]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "stop")
]
LOOK, STOP = ("look", {"where": "a } b", "n": [1, {"x": 2}]}), ("stop", {})
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "tools": TOOLS}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway before a model that writes PIECES, and drafts as the target does: several tokens come at once."""
    folder = scripted_models(tmp_path_factory.mktemp("scripted") / "model", PIECES)
    with running(folder, folder, threads=1) as services, gateway(services.coordinator.address, model=folder) as child:
        yield child.address


def calls_in(text: Text) -> list[tuple[str, Any]]:
    """Name and arguments of each call."""
    assert len({call["id"] for call in text.calls}) == len(text.calls) and all(call["id"] for call in text.calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in text.calls]


def both(address: str, body: dict[str, Any]) -> Text:
    """The answer's text; fails unless the stream and the whole answer say the same."""
    whole = whole_text(ask(address, PATH, body).json["choices"][0])
    (streamed,) = streamed_texts(events_of(ask(address, PATH, body | {"stream": True}).body))
    assert (whole.text, whole.reason, calls_in(whole)) == (streamed.text, streamed.reason, calls_in(streamed))
    return whole


@pytest.mark.parametrize("draft_length", [0, 1, 3, 9])
def test_calls_are_calls_whatever_comes_at_once(scripted: str, draft_length: int) -> None:
    """Claim: calls in the text, with a brace in a string and two calls with one mark's end and another's beginning in
    one token, are the same tool calls streamed and whole, without speculation and with any length of it."""
    speculative = {"policy": "fixed", "num_speculative_tokens": draft_length}
    text = both(scripted, ASKED | {"speculative": speculative})
    assert (text.text.strip(), text.reason, calls_in(text)) == ("Let me look.", "tool_calls", [LOOK, STOP])


def test_one_call_and_none(scripted: str) -> None:
    """Claim: with `parallel_tool_calls` false the answer ends after its first call, with its usage; with `tool_choice`
    none, and without tools, the same text is content; a tool that is not given is content too."""
    text = both(scripted, ASKED | {"parallel_tool_calls": False})
    assert (text.reason, calls_in(text)) == ("tool_calls", [LOOK])
    options = {"stream": True, "stream_options": {"include_usage": True}, "parallel_tool_calls": False}
    chunks = events_of(ask(scripted, PATH, ASKED | options).body)
    assert chunks[-1]["usage"]["completion_tokens"] > 5
    whole = "".join(PIECES)
    for change in ({"tool_choice": "none"}, {"tools": None}):
        text = both(scripted, ASKED | change)
        assert (text.text, text.reason, text.calls) == (whole, "stop", [])
    text = both(scripted, ASKED | {"tools": TOOLS[1:]})
    assert calls_in(text) == [STOP] and '"look"' in text.text


def test_an_unfinished_call_keeps_its_arguments(scripted: str) -> None:
    """Claim: `length` wins over an unfinished call, whose arguments stay as far as they came; a stop string in a call
    that had not begun gives back what was held as content."""
    whole = whole_text(ask(scripted, PATH, ASKED | {"max_tokens": 4}).json["choices"][0])
    (call,) = whole.calls
    assert whole.reason == "length" and call["function"]["arguments"] == '{"where": "a } b", "n'
    stopped = both(scripted, ASKED | {"stop": '"arguments'})
    assert (stopped.reason, stopped.calls) == ("stop", [])
    assert stopped.text == "".join(PIECES).partition('"arguments')[0]


def test_the_openai_client_has_the_calls(scripted: str) -> None:
    """Claim: the `openai` client's own accumulation of a stream has the calls, by its strict types."""
    client = openai.OpenAI(base_url=f"http://{scripted}/v1", api_key="none", max_retries=0)
    with client.chat.completions.stream(model="embedded", **ASKED) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls or ()] == ["look", "stop"]


SPECIAL = {"hermes": ("<tool_call>", "</tool_call>"), "llama3": ("<|python_tag|>", "<|eom_id|>")}


@pytest.mark.parametrize("call_format", ["llama3", pytest.param("hermes", marks=pytest.mark.more)])
def test_marks_may_be_special_tokens(call_format: str, tmp_path: Path) -> None:
    """Claim: where the mark of calls is a special token, which has no text, a call after it in mid-text is a call,
    whatever comes at once; what follows it is content, as is the mark's word in plain letters; a mark before no call,
    and an answer without tools, leave the text as it is without special tokens.

    Conclusive: the text before the mark makes an object without a mark content, which the last requests show.
    """
    mark, end = SPECIAL[call_format]
    call = ['{"name": "lo', 'ok", "arguments": {"where": "a } b", "n', '": [1, {"x": 2}]', "}}"]
    pieces = ["Let me look. ", mark, *call, end, f"So {mark[:5]}", f"{mark[5:]} is a mark."]
    text = "".join(piece for piece in pieces if piece not in (mark, end))
    folder = scripted_models(tmp_path / "model", pieces, (mark, end))
    with running(folder, folder, threads=1) as services:
        with gateway(services.coordinator.address, model=folder, tool_call_format=call_format) as child:
            for draft_length in (0, 2, 9):
                speculative = {"policy": "fixed", "num_speculative_tokens": draft_length}
                found = both(child.address, ASKED | {"speculative": speculative})
                assert (found.text, calls_in(found)) == (text.replace("".join(call), ""), [LOOK])
            for change in ({"tools": None}, {"tools": TOOLS[1:]}):
                found = both(child.address, ASKED | change)
                assert (found.text, found.calls) == (text, [])


def test_template_arguments_are_those_it_names(scripted: str, tmp_path: Path) -> None:
    """Claim: an argument that the template does not name, or a reserved one, is 400 with its name, as is
    `reasoning_effort` where the template has none; templates in requests are refused."""
    for change, param in (
        ({"chat_template_kwargs": {"nonsense": 1}}, "chat_template_kwargs.nonsense"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"a": "x" * (1 << 20)}}, "chat_template_kwargs"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
    ):
        refused = ask(scripted, PATH, ASKED | change)
        assert (refused.status, refused.error["param"]) == (400, param), refused.body
