"""The OpenAPI description of the interface, made from the request models and the table of fields.
`python -m specdec.gateway.openapi` writes openapi.json beside this file, which is what `/openapi.json` answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from specdec import __version__
from specdec.gateway.fields import BY_ENDPOINT, CHAT, COMPLETIONS, Fate
from specdec.gateway.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from specdec.gateway.strict import Strict

FILE = Path(__file__).with_name("openapi.json")
POSTS: dict[str, tuple[type[Strict], str]] = {
    "/v1/chat/completions": (ChatRequest, "The next message of a conversation, whole or as server-sent events."),
    "/v1/completions": (CompletionRequest, "Texts that continue prompts, whole or as server-sent events."),
    "/tokenize": (TokenizeRequest, "Token ids of a text or a conversation."),
    "/detokenize": (DetokenizeRequest, "Text of token ids."),
}
GETS = {
    "/v1/models": "The served model.",
    "/v1/models/{name}": "The served model, by its name.",
    "/tokenizer_info": "The tokenizer's configuration, special tokens and chat template.",
    "/health": "200 while a coordinator takes requests.",
    "/ping": "As /health.",
    "/version": "The version of specdec.",
    "/metrics": "Metrics of the gateway for Prometheus.",
    "/openapi.json": "This description.",
}
OPEN = ("/health", "/ping")  # that need no key
REFUSALS = {
    "400": "The request is refused: `param` names the field.",
    "401": "No key of this server.",
    "403": "The host is not served without keys.",
    "404": "The model or path is not served.",
    "408": "The request did not come in time.",
    "413": "The body is too long.",
    "415": "The body is not application/json.",
    "500": "A failure.",
    "503": "No coordinator takes requests, or all places are taken.",
    "504": "The request took longer than the server allows.",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def explain(schema: dict[str, Any], endpoint: str) -> None:
    """Adds to the schema of a request what each field means, and, as `x-refused`, the fields that are refused: the
    reason, and the values that ask for nothing and are accepted."""
    refused = {}
    for name, field in BY_ENDPOINT[endpoint].items():
        if field.fate is Fate.REFUSED:
            refused[name] = {"reason": field.meaning, "accepted": [None, *field.neutral]}
        else:
            schema["properties"][name]["description"] = field.meaning
            schema["properties"][name]["x-fate"] = field.fate.value
    schema["x-refused"] = refused


def describe() -> dict[str, Any]:
    """Returns the description."""
    models: list[tuple[Any, Any]] = [(model, "validation") for model, _ in POSTS.values()]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")
    explain(schemas["$defs"][ChatRequest.__name__], CHAT)
    explain(schemas["$defs"][CompletionRequest.__name__], COMPLETIONS)
    refused = {
        status: {
            "description": words,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        for status, words in REFUSALS.items()
    }
    paths: dict[str, Any] = {}
    for path, (model, words) in POSTS.items():
        schema = {"$ref": f"#/components/schemas/{model.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if path.endswith("completions"):
            content["text/event-stream"] = {"schema": {"type": "string"}}
        answers = {"200": {"description": words, "content": content}, **refused}
        paths[path] = {"post": {"summary": words, "requestBody": body, "responses": answers}}
    for path, words in GETS.items():
        own: dict[str, Any] = {"summary": words, "responses": {"200": {"description": words}, **refused}}
        if path in OPEN:
            own["security"] = []
        if "{name}" in path:
            own["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths[path] = {"get": own}
    return {
        "openapi": "3.1.0",
        "info": {"title": "specdec gateway", "version": __version__, "license": {"name": "Apache-2.0"}},
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def text() -> str:
    """Returns the content of the file."""
    return json.dumps(describe(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
