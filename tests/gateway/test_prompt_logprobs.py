"""Log-probabilities of prompts and `echo` over HTTP: what gRPC gives, in the forms of vLLM and of OpenAI."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.client.run import Run
from tests.support.gateways import LEGACY, ask, events_of
from tests.support.services import Services

PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
PROMPT = "The quick brown fox 日本 said: <|end|> return self.fox"


def scored(services: Services, prompt: Any, count: int) -> list[tuple[Any, ...]]:
    """A prompt's rows by gRPC: token, log-probability, rank, {likeliest token: its log-probability}."""
    client = services.client
    run = Run.of(client.stub.Generate(client.request(prompt, prompt_logprobs=count, max_tokens=0), timeout=60))
    rows: list[tuple[Any, ...]] = []
    for part in run.prompt_logprobs:
        for at, own in enumerate(zip(part.token_ids, part.logprobs, part.ranks, strict=True)):
            place = slice(at * count, (at + 1) * count)
            rows.append((*own, dict(zip(part.top_token_ids[place], part.top_logprobs[place]))))
    return rows


def expected_entry(row: tuple[Any, ...]) -> dict[str, tuple[float, int]]:
    """Log-probability and rank by token id, as `prompt_logprobs` has them."""
    token_id, logprob, rank, likeliest = row
    ranked = {str(own): (value, place) for place, (own, value) in enumerate(likeliest.items(), 1)}
    return ranked | {str(token_id): (logprob, rank)}


@pytest.mark.parametrize("path", [PATH, CHAT_PATH])
def test_prompt_logprobs_have_vllms_form(services: Services, address: str, path: str) -> None:
    """Claim: `prompt_logprobs` is a list with null for the first token and, for each other, a dictionary by token id
    of log-probability, rank and string, the token itself first: in completions of each choice, in chat of the answer;
    numbers are exactly those of gRPC, with output and with `max_tokens` 0.

    Conclusive: the token ids that the answer names are asked for by gRPC, and every number is compared.
    """
    what = {"prompt": PROMPT} if path == PATH else {"messages": [{"role": "user", "content": PROMPT}]}
    for most in (0, 2):
        body = {**what, "max_tokens": most, "temperature": 0, "prompt_logprobs": 2, "return_token_ids": True}
        answer = ask(address, path, body)
        assert answer.status == 200, answer.body
        holder = answer.json["choices"][0] if path == PATH else answer.json
        rows = scored(services, holder["prompt_token_ids"], 2)
        assert holder["prompt_logprobs"][0] is None and len(holder["prompt_logprobs"]) == len(rows) + 1
        for found, row in zip(holder["prompt_logprobs"][1:], rows):
            assert {key: (own["logprob"], own["rank"]) for key, own in found.items()} == expected_entry(row)
            assert next(iter(found)) == str(row[0]) and all(
                isinstance(own["decoded_token"], str) for own in found.values()
            )
        usage = answer.json["usage"]
        assert usage["prompt_tokens"] == len(rows) + 1 and usage["completion_tokens"] == most
        assert answer.json["choices"][0]["finish_reason"] == "length"


def test_echo_puts_the_prompt_before_the_answer(services: Services, address: str) -> None:
    """Claim: with `echo` text and log-probabilities begin with the prompt's, of texts and token ids, several prompts,
    streamed and not; the first token has null, offsets are those of the text, and what follows is the answer without
    `echo`. With `max_tokens` 0 the prompt is all.

    Conclusive: numbers are compared with gRPC's, the rest with the answer to the same request without `echo`.
    """
    ids = ask(address, "/tokenize", {"prompt": PROMPT}).json["tokens"]
    body = {"prompt": [PROMPT, PROMPT + " jumped"], "max_tokens": 3, "temperature": 0, "logprobs": 1}
    body["return_tokens_as_token_ids"] = True
    plain = ask(address, PATH, body).json["choices"]
    for prompts, texts in ((body["prompt"],) * 2, ([ids], [PROMPT])):
        own = body | {"prompt": prompts, "echo": True}
        whole = ask(address, PATH, own)
        assert whole.status == 200, whole.body
        none = ask(address, PATH, own | {"max_tokens": 0}).json
        assert none["usage"]["completion_tokens"] == 0
        chunks = events_of(ask(address, PATH, own | {"stream": True}).body)
        for index, (text, prompt) in enumerate(zip(texts, prompts)):
            choice, alone = whole.json["choices"][index], none["choices"][index]
            rows, rest = scored(services, prompt, 1), plain[index]
            assert choice["text"] == text + rest["text"] and alone["text"] == text
            assert choice["finish_reason"] == alone["finish_reason"] == "length"
            found = choice["logprobs"]
            for name in LEGACY:
                assert alone["logprobs"][name] == found[name][: len(rows) + 1]
            assert found["token_logprobs"] == [None, *(row[1] for row in rows), *rest["logprobs"]["token_logprobs"]]
            assert found["tokens"][1:] == [f"token_id:{row[0]}" for row in rows] + rest["logprobs"]["tokens"]
            tops = [{f"token_id:{key}": value for key, value in {**row[3], row[0]: row[1]}.items()} for row in rows]
            assert found["top_logprobs"] == [None, *tops, *rest["logprobs"]["top_logprobs"]]
            offsets = [len(text) + offset for offset in rest["logprobs"]["text_offset"]]
            assert found["text_offset"][len(rows) + 1 :] == offsets
            starts = found["text_offset"][: len(rows) + 1]
            assert starts[0] == 0 and starts == sorted(starts) and starts[-1] < len(text)
            mine = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == index]
            assert "".join(one["text"] for one in mine) == choice["text"]
            for name in LEGACY:
                parts = [one["logprobs"][name] for one in mine if one["logprobs"]]
                assert [value for part in parts for value in part] == found[name]
    shown = ask(address, PATH, {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "echo": True}).json["choices"][0]
    assert shown["text"].startswith(PROMPT) and shown["logprobs"] is None


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"prompt_logprobs": 1, "stream": True}, None, "stream: false"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "0"),
        ({"max_tokens": 0}, "max_tokens", "prompt_logprobs"),
        ({"max_tokens": 0, "echo": True}, "max_tokens", "prompt_logprobs"),
        ({"prompt": [[5] * 2000] * 4, "prompt_logprobs": 20}, "prompt_logprobs", "131072"),
        ({"prompt": [[5] * 2000] * 4, "logprobs": 20, "echo": True}, "logprobs", "131072"),
    ],
)
def test_refusals(address: str, asked: dict[str, Any], param: str | None, words: str) -> None:
    """Claim: what cannot be answered is 400 with the field and its limit. Conclusive: the other tests ask for the same
    within the limits."""
    answer = ask(address, PATH, {"prompt": "a b", "max_tokens": 1, "temperature": 0, **asked})
    assert answer.status == 400 and answer.error["param"] == param and words in answer.error["message"], answer.body
