"""The one table of fields against the models, the description and the page; what is refused, and how."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specdec.gateway import openapi
from specdec.gateway.fields import BY_ENDPOINT, CHAT, COMPLETIONS, TABLE, Fate, Field
from specdec.gateway.requests import ChatRequest, CompletionRequest
from specdec.gateway.strict import Strict
from tests.hygiene.sources import ROOT
from tests.support.gateways import ask, chat_folder, gateway
from tests.support.services import Services

MODELS: dict[str, type[Strict]] = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest}
PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "temperature": 0},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 1, "temperature": 0},
}
CASES = [(endpoint, field) for field in TABLE for endpoint in field.where]
# Values of honoured fields and metadata that are wrong, by what the table says of them.
WRONG: dict[str, Any] = {"store": True, "service_tier": "flex", "tool_choice": "any", "prompt": {}, "top_k": -2}


def test_the_models_have_the_tables_fields() -> None:
    """Claim: the request models know exactly the fields that the table calls honoured or metadata, each field is in the
    table once, and there are some of each kind."""
    for endpoint, model in MODELS.items():
        known = {name for name, field in BY_ENDPOINT[endpoint].items() if field.fate is not Fate.REFUSED}
        assert set(model.model_fields) == known
    names = [field.name for field in TABLE]
    assert len(names) == len(set(names)) and {field.fate for field in TABLE} == set(Fate)


def test_the_description_is_that_of_the_models(address: str) -> None:
    """Claim: openapi.json, which is served, is what the models say, and has the fields that the table has."""
    assert openapi.FILE.read_text(encoding="utf-8") == openapi.text(), "run python -m specdec.gateway.openapi"
    served = ask(address, "/openapi.json")
    assert served.json == openapi.describe()
    for endpoint, model in MODELS.items():
        schema = served.json["components"]["schemas"][model.__name__]
        known = {name for name, field in BY_ENDPOINT[endpoint].items() if field.fate is not Fate.REFUSED}
        assert set(schema["properties"]) == known and schema["additionalProperties"] is False
        told = {name: own["description"] for name, own in schema["properties"].items()}
        told |= {name: own["reason"] for name, own in schema["x-refused"].items()}
        assert told == {name: field.meaning for name, field in BY_ENDPOINT[endpoint].items()}


def test_the_page_has_the_fields() -> None:
    """Claim: docs/http.md names every field of the table by its fate, and no other."""
    page = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    for fate in Fate:
        (line,) = re.findall(rf"^\| {fate.value} \| (.*) \|$", page, re.MULTILINE)
        assert re.findall(r"`(\w+)`", line) == [field.name for field in TABLE if field.fate is fate]


def wrong_value(field: Field) -> Any:
    """A value that the field cannot have."""
    return WRONG.get(field.name, {"no": ["such"]} if field.fate is Fate.REFUSED else object_of_no_field())


def object_of_no_field() -> Any:
    """A value that no field has: a list of a list of null."""
    return [[None]]


@pytest.mark.parametrize(("endpoint", "field"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_wrong_value_is_refused_by_name(address: str, endpoint: str, field: Field) -> None:
    """Claim: every field of the table refuses a value that it cannot have: 400 in OpenAI's form, with the field as
    `param`; a refused field by the code unsupported_parameter and its reason. What asks for nothing passes: null, and
    the values that the table calls so.

    Conclusive: the same request without the field is answered, so the field is what is refused.
    """
    answer = ask(address, PATHS[endpoint], LEAST[endpoint] | {field.name: wrong_value(field)})
    assert answer.status == 400, answer.body
    error = answer.error
    assert error["type"] == "invalid_request_error" and error["param"].partition(".")[0] == field.name, error
    if field.fate is Fate.REFUSED:
        assert error["code"] == "unsupported_parameter" and field.meaning in error["message"]
        for neutral in (None, *field.neutral):
            passed = ask(address, PATHS[endpoint], LEAST[endpoint] | {field.name: neutral})
            assert passed.status == 200, passed.body


@pytest.mark.parametrize(
    ("body", "code", "param", "words"),
    [
        (b"{", "invalid_json", None, "JSON"),
        (b"[]", "invalid_json", None, "object"),
        (b'{"prompt": "\\ud800"}', "invalid_json", None, "JSON"),
        (b'{"prompt": NaN}', "invalid_json", None, "JSON"),
        (b'{"prompt": "a", "temprature": 1}', "unknown_parameter", "temprature", "did you mean temperature?"),
        (b"{}", "missing_required_parameter", "prompt", "missing"),
        (b'{"prompt": []}', "invalid_value", "prompt", "text"),
        (b'{"prompt": ["a", ""]}', "invalid_value", "prompt", "empty"),
        (b'{"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}', "invalid_value", None, "equal"),
        (b'{"prompt": "a", "temperature": 1000}', "invalid_value", "temperature", "100"),
        (b'{"prompt": "a", "logit_bias": {"x": 1}}', "invalid_value", "logit_bias", "token ids"),
        (b'{"prompt": "a", "logit_bias": {"99999": 1}}', "invalid_value", "logit_bias", "4095"),
        (b'{"prompt": [99999]}', "invalid_value", "prompt", "4095"),
        (b'{"prompt": "a", "stop": ["' + b"s" * 300 + b'"]}', "invalid_value", "stop", "256"),
        (b'{"prompt": "a", "speculative": {"rule": "greedy"}}', "invalid_value", "speculative.rule", "temperature"),
        (b'{"prompt": "a", "speculative": {"rounds": 1}}', "invalid_value", "speculative.rounds", "boolean"),
        (b'{"prompt": "a", "speculative": {"n": 1}}', "unknown_parameter", "speculative.n", "n is not known"),
        (b'{"prompt": "a", "stream_options": {}}', "invalid_value", None, "stream"),
        (
            b'{"prompt": "a", "stream": true, "stream_options": {"continuous_usage_stats": true}}',
            "invalid_value",
            "stream_options",
            "include_usage",
        ),
        (b'{"prompt": "a", "metadata": ' + b'{"a":' * 300 + b"1" + b"}" * 301, "invalid_json", None, "recursion"),
    ],
)
def test_refusals_name_field_value_and_limit(
    address: str, body: bytes, code: str, param: str | None, words: str
) -> None:
    """Claim: a request that is refused, by the gateway or by the coordinator, is told by which field, in one form."""
    answer = ask(address, "/v1/completions", body)
    assert answer.status == 400, answer.body
    assert (answer.error["code"], answer.error["param"]) == (code, param) and words in answer.error["message"]


def test_what_is_too_long_is_said_in_the_clients_words(address: str) -> None:
    """Claim: a prompt, or prompt and output, longer than the model is 400 `context_length_exceeded` with the sentence
    that clients look for, of chat, text and token ids alike, and the counts in it are right."""
    long = "one two three " * 900
    count = ask(address, "/tokenize", {"prompt": long}).json["count"]
    assert count > 2048
    sentence = (
        f"maximum context length is 2048 tokens. However, you requested {count + 5} tokens ({count} in the messages"
    )
    answer = ask(address, "/v1/completions", {"prompt": long, "max_tokens": 5})
    assert answer.error["code"] == "context_length_exceeded" and sentence in answer.error["message"], answer.body
    ids = ask(address, "/v1/completions", {"prompt": [5] * 2040, "max_tokens": 20})
    assert ids.error["code"] == "context_length_exceeded" and "requested 2060 tokens" in ids.error["message"]
    chat = ask(address, "/v1/chat/completions", {"messages": [{"role": "user", "content": long}], "max_tokens": 5})
    assert chat.error["code"] == "context_length_exceeded" and chat.error["param"] == "messages"
    assert "maximum context length is 2048 tokens" in chat.error["message"]
    huge = ask(address, "/v1/completions", {"prompt": "x" * 1_000_000})
    assert huge.error["code"] == "context_length_exceeded"


def test_sampling_defaults_of_the_model_are_taken_when_asked_for(services: Services, tmp_path: Path) -> None:
    """Claim: with --generation-config model the folder's sampling parameters are the defaults, /v1/models says so, and
    a request's own go before them; without, they are not taken. Conclusive: texts of one seed are compared with those
    of requests that name the values."""
    folder = chat_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"temperature": 0.4, "top_k": 5, "eos_token_id": 0}', "utf-8")
    body = {"prompt": "Once upon a time", "seed": 3, "max_tokens": 24, "ignore_eos": True}
    named = body | {"temperature": 0.4, "top_k": 5}
    texts = {}
    for source in ("model", "none"):
        with gateway(services.coordinator.address, model=folder, generation_config=source) as child:
            texts[source] = [
                ask(child.address, "/v1/completions", own).json["choices"][0]["text"]
                for own in (body, named, body | {"temperature": 1.0, "top_k": 0})
            ]
            (model,) = ask(child.address, "/v1/models").json["data"]
            assert model.get("sampling_defaults") == ({"temperature": 0.4, "top_k": 5} if source == "model" else None)
    assert texts["model"][0] == texts["model"][1] == texts["none"][1] != texts["none"][0]
    assert texts["none"][0] == texts["none"][2] == texts["model"][2]


def test_another_model_is_not_found(address: str) -> None:
    """Claim: a request for a model that is not served is 404 `model_not_found`, also at /v1/models/NAME."""
    answer = ask(address, "/v1/completions", {"prompt": "a", "model": "gpt-4"})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert ask(address, "/v1/models/gpt-4").status == 404
    (model,) = ask(address, "/v1/models").json["data"]
    assert ask(address, "/v1/models/embedded").json == model and model["id"] == "embedded"
    assert json.dumps(model["max_model_len"]) == "2048"
