"""The form of every stream of events, and the strict types of the `openai` package."""

from __future__ import annotations

import random
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from tests.support.gateways import ask, events_of, streamed_texts

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
PROMPTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Tell me"}]},
    "completions": {"prompt": ["Once upon", [5, 6, 7], "def f"]},
}
MORE: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": False}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"return_token_ids": True, "stream_options": {"include_usage": True}},
    {"stop": ["e", "a"], "prediction": {"type": "content", "content": "the end"}},
    {"max_tokens": 1, "stream_options": {"include_usage": True}},
]


def check_stream(kind: str, chunks: list[dict[str, Any]], options: dict[str, bool]) -> None:
    """Checks order and form of the chunks of one stream. `options`: its `stream_options`."""
    assert len({(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    if options.get("include_usage"):
        *chunks, last = chunks
        assert last["choices"] == [] and last["usage"]["total_tokens"] > 0
        if options.get("continuous_usage_stats"):
            check_usage([chunk["usage"] for chunk in chunks], last["usage"])
        else:
            assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    count = 1 if kind == "chat" else 3
    for index in range(count):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        reasons = [choice["finish_reason"] for choice in own]
        assert reasons[-1] in ("stop", "length") and not any(reasons[:-1])
        if kind == "chat":
            assert own[0]["delta"] == {"role": "assistant", "content": ""} and own[-1]["delta"] == {}
            assert not any("role" in choice["delta"] for choice in own[1:])
        else:
            assert own[-1]["text"] == ""
        silent = [choice for choice in own[1:-1] if not (choice.get("text") or choice.get("delta", {}).get("content"))]
        assert all(choice["logprobs"] or choice.get("token_ids") for choice in silent), "a chunk that says nothing"


def check_usage(usages: list[dict[str, Any]], last: dict[str, Any]) -> None:
    """Checks that the usage of each chunk leads to the last one."""
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[-1] == last["completion_tokens"] > counts[0]
    assert all(usage["prompt_tokens"] == last["prompt_tokens"] for usage in usages)
    assert all(usage["total_tokens"] == last["prompt_tokens"] + usage["completion_tokens"] for usage in usages)


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("more", MORE, ids=str)
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_every_stream_has_the_form(address: str, kind: str, more: dict[str, Any], has_logprobs: bool) -> None:
    """Claim: in every stream the role comes first in chat, the end of each choice once and last, the usage after it and
    only if asked for, then [DONE], and no chunk says nothing; the usage so far of each chunk leads to that of the end.
    Every object passes the strict types of `openai`, but for the reason of an end that is not there yet, which the
    older endpoint's own type does not know.

    Conclusive: `events_of` fails for any line that is not one object of JSON without NaN, and without [DONE] at the
    end; `openai` validates strictly.
    """
    body: dict[str, Any] = {"max_tokens": 9, "temperature": 1, "seed": 3, **PROMPTS[kind], **more}
    if has_logprobs:
        body |= {"logprobs": True, "top_logprobs": 2} if kind == "chat" else {"logprobs": 2}
    options = body.pop("stream_options", {})
    whole = ask(address, PATHS[kind], body).json
    answer_type: Any = ChatCompletion if kind == "chat" else Completion
    TypeAdapter(answer_type).validate_python(whole, strict=True)
    streamed = ask(address, PATHS[kind], body | {"stream": True} | ({"stream_options": options} if options else {}))
    assert streamed.headers["content-type"].startswith("text/event-stream") and "x-request-id" in streamed.headers
    chunks = events_of(streamed.body)
    check_stream(kind, chunks, options)
    for chunk in chunks:
        if kind == "chat":
            TypeAdapter(ChatCompletionChunk).validate_python(chunk, strict=True)
        else:
            ended = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
            TypeAdapter(Completion).validate_python(chunk | {"choices": ended}, strict=True)
    texts = streamed_texts(chunks, len(whole["choices"]))
    assert [text.text for text in texts] == [
        choice["message"]["content"] if kind == "chat" else choice["text"] for choice in whole["choices"]
    ]


def test_the_openai_client_reads_both_kinds(address: str) -> None:
    """Claim: the unmodified `openai` client gets the same text whole, streamed and by its own accumulation, and its
    errors are of its own classes."""
    client = openai.OpenAI(
        base_url=f"http://{address}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    )
    ask_for: dict[str, Any] = {
        "model": "embedded",
        "messages": [{"role": "user", "content": "Say 日本"}],
        "max_completion_tokens": 12,
        "seed": -5,
    }
    whole = client.chat.completions.create(**ask_for)
    pieces = client.chat.completions.create(**ask_for, stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices)
    assert text == whole.choices[0].message.content
    with client.chat.completions.stream(**ask_for) as stream:
        for _ in stream:
            pass
        assert stream.current_completion_snapshot.choices[0].message.content == text
    assert [model.id for model in client.models.list()] == ["embedded"]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    both = client.chat.completions.create(**ask_for, n=2)
    assert [choice.index for choice in both.choices] == [0, 1] and both.choices[0].message.content == text
    with pytest.raises(openai.BadRequestError, match="n: .* 16"):
        client.chat.completions.create(**ask_for, n=17)


def test_rounds_and_metrics_are_those_of_the_statistics(address: str) -> None:
    """Claim: with `speculative.rounds` and `statistics` the rounds of all chunks sum to the statistics, their tokens
    are the answer's, whole and streamed; `metrics.speculative_decoding` has a histogram with one entry more than
    `num_spec_tokens`, as AIPerf demands."""
    draw = random.Random(1)
    for _ in range(4):
        body = {
            "prompt": "Once upon a time there was",
            "max_tokens": draw.randint(5, 40),
            "seed": draw.getrandbits(63),
            "return_token_ids": True,
            "speculative": {"rounds": True, "statistics": True, "policy": "fixed", "num_speculative_tokens": 4},
        }
        whole = ask(address, "/v1/completions", body).json
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events_of(ask(address, "/v1/completions", body | options).body)
        parts = [chunk["speculative"] for chunk in chunks if "speculative" in chunk]
        for found in ([whole["speculative"]], parts):
            rounds = [own for part in found for own in part.get("rounds", [])]
            (statistics,) = [part["statistics"] for part in found if "statistics" in part]
            assert [own["round_index"] for own in rounds] == list(range(statistics["rounds"]))
            assert sum(len(own["draft_token_ids"]) for own in rounds) == statistics["num_draft_tokens"]
            assert sum(len(own["accepted"]) for own in rounds) == statistics["num_accepted_draft_tokens"]
            assert all(len(own["draft_texts"]) == len(own["draft_token_ids"]) for own in rounds)
            token_ids = [token_id for part in found for token_id in part.get("token_ids", [])]
            kinds = [kind for part in found for kind in part.get("kinds", [])]
            assert token_ids == whole["choices"][0]["token_ids"] and len(kinds) == len(token_ids)
        for ending in (whole, chunks[-1]):
            metrics = ending["metrics"]["speculative_decoding"]
            assert len(metrics["acceptance_histogram"]) == metrics["num_spec_tokens"] + 1
            assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"]
