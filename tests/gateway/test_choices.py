"""Several choices over HTTP: each is the answer to the single request, whole and streamed, also when its stream is
lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.engine.table_model import write_table_model
from tests.support.gateways import Streaming, Text, ask, events_of, gateway, metric, streamed_texts, whole_text
from tests.support.services import running
from tests.support.waiting import until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OPTIONS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "Once upon"}], "logprobs": True, "top_logprobs": 2}),
    "completions": (COMPLETIONS, {"prompt": ["def main():\n", [5, 6, 7]], "logprobs": 2, "best_of": 3}),
    "greedy": (COMPLETIONS, {"prompt": "a b", "temperature": 0, "stop": ["e", "\n"]}),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_choice_is_the_single_answer(address: str, kind: str) -> None:
    """Claim: with `n`, whole and streamed, choice i of prompt p has index p * n + i and is the answer to that prompt
    alone with seed + i: text, ids, log-probabilities, reason of the end. Usage counts each prompt once, and the tokens
    of all choices.

    Conclusive: every choice of both forms is compared with a request of its own.
    """
    path, body = BODIES[kind]
    body = {"max_tokens": 9, "seed": -1, "return_token_ids": True, "return_tokens_as_token_ids": True, **body}
    count = 3
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) else [body.get("prompt")]
    singles: list[dict[str, Any]] = []
    for prompt in prompts:
        for index in range(count):
            own = body | {"seed": -1 + index, "best_of": 1} | ({} if prompt is None else {"prompt": prompt})
            if path == CHAT:
                del own["best_of"]
            singles.append(ask(address, path, own).json)
    texts = [whole_text(own["choices"][0]) for own in singles]
    prompt_count = sum(own["usage"]["prompt_tokens"] for own in singles[::count])
    output_count = sum(own["usage"]["completion_tokens"] for own in singles)

    def check(found: list[Text], usage: dict[str, Any]) -> None:
        assert [text.text for text in found] == [text.text for text in texts]
        assert [(text.token_ids, text.reason) for text in found] == [(text.token_ids, text.reason) for text in texts]
        assert [text.logprobs for text in found] == [text.logprobs for text in texts]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_count, output_count)
        assert usage["total_tokens"] == prompt_count + output_count
        assert usage["prompt_tokens_details"]["cached_tokens"] <= prompt_count

    whole = ask(address, path, body | {"n": count}).json
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(texts)))
    assert "metrics" not in whole
    for choice, own in zip(whole["choices"], singles):
        assert choice.get("prompt_token_ids") == own["choices"][0].get("prompt_token_ids")
    check([whole_text(choice) for choice in whole["choices"]], whole["usage"])
    chunks = events_of(ask(address, path, body | {"n": count} | OPTIONS).body)
    check(streamed_texts(chunks, len(texts)), chunks[-1]["usage"])
    assert all(chunk["usage"]["prompt_tokens"] == prompt_count for chunk in chunks)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "speculative": {"rounds": True}}, "speculative"),
    ],
    ids=str,
)
def test_other_counts_are_refused(address: str, more: dict[str, Any], param: str) -> None:
    """Claim: `n` beyond 1 to 16, another `best_of` than `n`, and rounds of several choices are 400 by their names."""
    answer = ask(address, COMPLETIONS, {"prompt": "a", "max_tokens": 1} | more)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


@pytest.mark.more
def test_choices_outlive_their_coordinator(tmp_path: Path) -> None:
    """Claim: when the coordinator of a stream of three choices is killed, and a second one is listed, each choice goes
    on there: text, ids and log-probabilities of each are those of the undisturbed answer.

    Conclusive: SIGKILL while tokens of all three come; the gateway counts the resumptions.
    """
    write_table_model(tmp_path / "target", 7, 8192, seed=1)
    write_table_model(tmp_path / "draft", 7, 8192, seed=2)
    body = {"prompt": "<1><2><3>", "n": 3, "max_tokens": 400, "ignore_eos": True, "seed": 5, "logprobs": 1}
    body |= {"return_token_ids": True}
    with running(tmp_path / "target", tmp_path / "draft", {"draft_wait_ms": 50.0}, threads=1) as services:
        killed, client = services.start_coordinator()
        client.close()
        with gateway(killed.address, services.coordinator.address, model=tmp_path / "target") as child:
            whole = ask(child.address, COMPLETIONS, body).json
            stream = Streaming(child.address, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
            until(lambda: stream.event_count > 60, 60.0)
            assert not stream.has_ended
            killed.process.kill()
            killed.stop(0.0)
            chunks = events_of(stream.result())
            assert metric(child.address, "specdec_gateway_resumptions_total") >= 1
    texts, expected = streamed_texts(chunks, 3), list(map(whole_text, whole["choices"]))
    for own, single in zip(texts, expected):
        assert (own.text, own.token_ids, own.logprobs) == (single.text, single.token_ids, single.logprobs)
        assert own.reason == "length" and len(own.token_ids) == 400
    assert len({tuple(text.token_ids) for text in texts}) == 3
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (whole["usage"]["prompt_tokens"], 1200)
