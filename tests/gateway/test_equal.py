"""What HTTP gives is what gRPC gives, whatever the form of the answer."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specdec.v1 import coordinator_service_pb2 as pb
from tests.support.gateways import Text, ask, events_of, streamed_texts, whole_text
from tests.support.services import SHAPES, Outcome, Services

WIDTH = 6
WORDS = [
    "Once upon a time",
    "def main():\n",
    "The quick 日本 fox",
    "æ",
    "1, 2, 3,",
    " return self.",
    "<|end|> x",
    "\n\n",
]
REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
WORDS_OF_WIRE = ("policy", "rule")


def random_request(draw: random.Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A path, a body of HTTP, and the fields of gRPC that mean the same but for the prompt."""
    fields: dict[str, Any] = {"max_tokens": draw.randint(1, 9), "temperature": draw.choice([0, 0.7, 1, 1.3])}
    if fields["temperature"] or draw.random() < 0.3:
        fields["seed"] = draw.getrandbits(64)
    for name, value in (
        ("top_p", draw.choice([0.5, 0.9])),
        ("top_k", draw.randint(1, 60)),
        ("min_p", 0.05),
        ("repetition_penalty", 1.2),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("min_tokens", 1),
        ("ignore_eos", True),
        ("logit_bias", {draw.randint(0, 4000): draw.choice([-5.0, 3.0]) for _ in range(3)}),
        ("stop", draw.sample(["e", "the", "\n", ").", "self"], 2)),
        ("stop_token_ids", [draw.randint(0, 4000)]),
        ("bad_words", draw.sample(["the", "e", "self", ").", "\n\n"], 2)),
        ("allowed_token_ids", draw.sample(range(4000), 500)),
    ):
        if draw.random() < 0.25:
            fields[name] = value
    body = dict(fields, return_token_ids=True)
    if "logit_bias" in body:
        body["logit_bias"] = {str(key): value for key, value in body["logit_bias"].items()}
    if "seed" in body and draw.random() < 0.5:
        body["seed"] -= 1 << 64 if body["seed"] >> 63 else 0
    is_chat = draw.random() < 0.5
    if draw.random() < 0.5:
        fields["logprobs"] = draw.choice([0, 1, 3])
        body |= {"logprobs": True, "top_logprobs": fields["logprobs"]} if is_chat else {"logprobs": fields["logprobs"]}
        body["return_tokens_as_token_ids"] = True  # several tokens may have one string
    shape = SHAPES[draw.choice(sorted(SHAPES))]
    body["speculative"] = {
        name: value.split("_")[-1].lower() if name in WORDS_OF_WIRE else value for name, value in shape.items()
    }
    if "proposers" in shape:
        body["speculative"]["proposers"] = [name.removeprefix("PROPOSER_").lower() for name in shape["proposers"]]
    text = "".join(draw.choices(WORDS, k=draw.randint(1, 6)))
    if is_chat:
        roles = ["system", "user", "assistant", "user"][draw.randint(0, 1) : draw.choice([2, 4])]
        body["messages"] = [{"role": role, "content": text} for role in roles]
        return "/v1/chat/completions", body, {**fields, "speculative": shape}
    body["prompt"] = text if draw.random() < 0.5 else [draw.randint(0, 4000) for _ in range(draw.randint(1, 9))]
    return "/v1/completions", body, {**fields, "speculative": shape}


def check(text: Text, usage: dict[str, int], outcome: Outcome, is_chat: bool) -> None:
    """Compares one choice with gRPC's outcome."""
    assert text.text == outcome.text
    assert text.token_ids == outcome.token_ids
    assert text.reason == REASONS[outcome.finished.reason]
    counts = outcome.finished.usage
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (counts.prompt_tokens, counts.output_tokens)
    assert usage["total_tokens"] == counts.prompt_tokens + counts.output_tokens
    assert len(text.logprobs) == len(outcome.logprobs)
    for own, token_id, (logprob, top_ids, tops) in zip(text.logprobs, outcome.token_ids, outcome.logprobs):
        likeliest = {f"token_id:{top_id}": value for top_id, value in zip(top_ids, tops)}
        if is_chat:
            assert (own["token"], own["logprob"]) == (f"token_id:{token_id}", logprob)
            assert {top["token"]: top["logprob"] for top in own["top_logprobs"]} == likeliest
        else:
            assert own[:2] == (f"token_id:{token_id}", logprob)
            assert own[2] == likeliest | {own[0]: logprob}


@pytest.mark.lengthy
@pytest.mark.parametrize(("seed", "count"), [(45, 50), pytest.param(46, 200, marks=pytest.mark.more)])
def test_http_gives_what_grpc_gives(services: Services, address: str, seed: int, count: int) -> None:
    """Claim: of random requests, streamed and not, text, ids, log-probabilities, usage and reason of the end are equal
    to those of `Generate`: 50 in `make test`, 200 others in `make test-more`.

    Conclusive: the requests have seeds or temperature 0, all kinds of parameters and ways to speculate, texts with
    characters of several tokens, stops and biases; every value is compared exactly.
    """
    draw = random.Random(seed)
    asked = [random_request(draw) for _ in range(count)]

    def compare(own: tuple[str, dict[str, Any], dict[str, Any]]) -> tuple[int, bool]:
        path, body, fields = own
        is_chat = "chat" in path
        whole = ask(address, path, body)
        assert whole.status == 200, whole.body
        answer = whole.json
        prompt = answer["prompt_token_ids"] if is_chat else answer["choices"][0]["prompt_token_ids"]
        outcome = services.client.generate(prompt, **fields)
        check(whole_text(answer["choices"][0]), answer["usage"], outcome, is_chat)
        streamed = ask(address, path, body | {"stream": True, "stream_options": {"include_usage": True}})
        assert streamed.status == 200, streamed.body
        chunks = events_of(streamed.body)
        check(streamed_texts(chunks)[0], chunks[-1]["usage"], outcome, is_chat)
        return len(outcome.token_ids), bool(outcome.logprobs)

    with ThreadPoolExecutor(WIDTH) as pool:
        found = list(pool.map(compare, asked))
    assert len(found) == count
    assert sum(tokens for tokens, _ in found) > 2 * count and sum(has for _, has in found) > count / 4
