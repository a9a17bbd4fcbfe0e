"""Log-probabilities of prompts through the running services: those of the model, and the same bits however a prompt is
read."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from specdec.client.events import event_of
from specdec.client.run import Run
from specdec.config import TargetSettings, split_address
from specdec.engine.table_model import write_table_model
from specdec.launch.children import start
from specdec.protocol.limits import PROMPT_LOGPROBS_COUNT_MAX
from specdec.protocol.types import PromptLogprobs
from tests.support.services import MODELS, SHAPES, Client, Services, running

TEXTS = [json.loads(line)["prompt"] for line in (MODELS / "heldout_prompts.jsonl").read_text().splitlines()[:6]]
TOP_COUNT = 4


def scored(client: Client, prompt: Any, timeout_s: float = 120.0, **asked: Any) -> Run:
    """A generation with log-probabilities of its prompt; fails unless all their parts come before the first token."""
    asked = {"prompt_logprobs": TOP_COUNT, "temperature": 0, "max_tokens": 0, **asked}
    run = Run()
    for response in client.stub.Generate(client.request(prompt, **asked), timeout=timeout_s):
        event = event_of(response)
        assert not (isinstance(event, PromptLogprobs) and run.token_ids)
        run.take(event)
    return run


def rows_of(run: Run) -> list[tuple[Any, ...]]:
    """One entry for each prompt token but the first: token, log-probability, rank, likeliest tokens, theirs. Fails for
    a position that is missing or comes twice, and for a message of too many."""
    assert run.started is not None and run.finished is not None
    rows: list[tuple[Any, ...]] = []
    for part in run.prompt_logprobs:
        assert part.first_index == len(rows) + 1 and 1 <= len(part.token_ids) <= PROMPT_LOGPROBS_COUNT_MAX
        width = len(part.top_token_ids) // len(part.token_ids)
        for at, own in enumerate(zip(part.token_ids, part.logprobs, part.ranks, strict=True)):
            place = slice(at * width, (at + 1) * width)
            rows.append((*own, tuple(part.top_token_ids[place]), tuple(part.top_logprobs[place])))
    assert len(rows) == run.started.prompt_length - 1 == run.finished.prompt_tokens - 1
    return rows


def test_they_are_those_of_transformers(shipped_pair: Services) -> None:
    """Claim: log-probability, rank and likeliest tokens of every prompt token are those of `transformers` in float32
    within 1e-3 nats, of prompts of one chunk and of many, and no token is generated: usage 0, reason length.

    Conclusive: a library that this project did not write computes the whole prompt in one forward; ranks are counted in
    its logits, so a row that is off by one fails.
    """
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    for text in (TEXTS[0], " ".join(TEXTS)):
        run = scored(shipped_pair.client, text)
        rows = rows_of(run)
        assert run.finished is not None and not run.token_ids and run.finished.output_tokens == 0
        assert run.finished.reason is not None and run.finished.reason.name == "LENGTH"
        first = tokenizer.encode(text).ids[0]
        with torch.inference_mode():
            logits = model(torch.tensor([[first, *(row[0] for row in rows)]])).logits[0].double()
        expected = logits.log_softmax(-1)
        for at, (token_id, logprob, rank, top_ids, tops) in enumerate(rows):
            assert abs(expected[at, token_id].item() - logprob) < 1e-3
            close = (expected[at] - expected[at, token_id]).abs() < 1e-3
            above = int(((expected[at] > expected[at, token_id]) & ~close).sum())
            assert above < rank <= above + int(close.sum())
            assert len(top_ids) == TOP_COUNT and list(tops) == sorted(tops, reverse=True)
            assert torch.allclose(expected[at].topk(TOP_COUNT).values, torch.tensor(tops).double(), atol=1e-3)
            assert torch.allclose(expected[at, list(top_ids)], torch.tensor(tops).double(), atol=1e-3)
            assert token_id not in top_ids or top_ids.index(token_id) == rank - 1


def test_equal_bits_however_a_prompt_is_read(shipped_pair: Services) -> None:
    """Claim: the numbers of a prompt have the same bits, and come once each in order, alone and beside others, with its
    prefix in the cache and not, with every kind of speculation and without, with output and without, with chunks cut by
    other prompts' rows; and the text after it is that of the request without them.

    Conclusive: all are compared exactly; the cache holds most of each prompt, which the statistics of a plain request
    show, and 12 requests at once share steps.
    """
    client = shipped_pair.client
    prompts = [(text + " ") * 4 for text in TEXTS]
    fresh = [rows_of(scored(client, prompt, cache_salt=f"bits {index}")) for index, prompt in enumerate(prompts)]
    again = [rows_of(scored(client, prompt, cache_salt=f"bits {index}")) for index, prompt in enumerate(prompts)]
    assert again == fresh
    plain = [client.generate(prompt, temperature=0, max_tokens=8) for prompt in prompts]
    repeated = client.generate(prompts[0], temperature=0, max_tokens=8)
    assert repeated.finished.statistics.cached_prompt_tokens > len(fresh[0]) // 2
    shapes = itertools.islice(itertools.cycle(SHAPES.values()), 2 * len(prompts))
    asked = [(index % len(prompts), shape) for index, shape in enumerate(shapes)]

    def run(own: tuple[int, dict[str, Any]]) -> Run:
        index, shape = own
        return scored(client, prompts[index], speculative=shape, max_tokens=8)

    with ThreadPoolExecutor(len(asked)) as pool:
        for (index, _), found in zip(asked, pool.map(run, asked)):
            assert rows_of(found) == fresh[index]
            assert found.token_ids == plain[index].token_ids and found.text == plain[index].text
    none = rows_of(scored(client, prompts[0], prompt_logprobs=0))
    assert none == [(*row[:3], (), ()) for row in fresh[0]]


@pytest.mark.parametrize(("length", "max_tokens"), [(300, 4), (300, 0), (1, 0)])
def test_choices_have_those_of_one_reading(shipped_pair: Services, length: int, max_tokens: int) -> None:
    """Claim: each choice of a request has the log-probabilities of its single, before its first token, and none but the
    first scores the prompt: the others find it in the cache. Without output all end at once. Conclusive: compared bit
    by bit; the target says what it found in its cache, and the prompt is new to it."""
    client, count = shipped_pair.client, 3
    prompt = [(5 * index * index + 11 * max_tokens) % 4000 for index in range(length)]
    asked = {"prompt_logprobs": TOP_COUNT, "max_tokens": max_tokens, "temperature": 1}
    runs = [Run() for _ in range(count)]
    for response in client.stub.Generate(client.request(prompt, n=count, seed=5, **asked), timeout=120):
        event, own = event_of(response), runs[response.choice]
        assert not (isinstance(event, PromptLogprobs) and own.token_ids)
        own.take(event)
    for index, own in enumerate(runs):
        single = scored(client, prompt, seed=5 + index, **asked)
        assert (rows_of(own), own.token_ids) == (rows_of(single), single.token_ids)
        assert own.finished.reason == single.finished.reason
    block = client.described().target.cache.block_size
    cached = [own.finished.statistics.cached_prompt_tokens for own in runs]
    assert cached[0] == 0 and (not max_tokens or min(cached[1:]) > length - block)


def test_what_is_refused_and_what_is_least(table_services: Services) -> None:
    """Claim: `max_tokens` 0 without log-probabilities of a prompt, more than 20 likeliest, and 0 with output tokens in
    `resume` are refused by field; a prompt of one token has none and ends at once; with output tokens resumed none are
    sent. Conclusive: each is the smallest request of its kind, beside one that is served."""
    client = table_services.client
    for field, asked in (
        ("sampling.max_tokens", {"prompt_logprobs": None}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("resume.output_token_ids", {"resume": [1]}),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            scored(client, [1, 2, 3], **asked)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and field in refused.value.details()
    for asked in ({}, {"max_tokens": 2}):
        run = scored(client, [3], **asked)
        assert rows_of(run) == [] and len(run.token_ids) == asked.get("max_tokens", 0)
    assert len(rows_of(scored(client, [1, 2, 3]))) == 2
    resumed = scored(client, [1, 2, 3], max_tokens=5, ignore_eos=True, resume=[1])
    assert not resumed.prompt_logprobs and len(resumed.token_ids) == 4


def test_a_target_lost_in_mid_prompt(tmp_path: Path) -> None:
    """Claim: when the target is killed while a prompt is scored and comes back, each position is sent once, with the
    bits of the undisturbed request, and the text follows.

    Conclusive: SIGKILL after the first parts, of a prompt of 30,000 tokens of which most are not sent then; the lengths
    and numbers of all are compared exactly, and the statistics count the move.
    """
    write_table_model(tmp_path / "target", 7, positions_max=1 << 15, seed=1)
    prompt = [1 + index * index % 5 for index in range(30_000)]
    asked = {"max_tokens": 3, "ignore_eos": True}
    with running(tmp_path / "target", None, threads=1) as services:
        settings = TargetSettings(model=str(tmp_path / "target"), port=0, threads=1, log_level="error")
        with start("target", settings) as first:
            own, client = services.start_coordinator(target=first.wait_ready(), target_wait_s=60.0)
            again = settings.model_copy(update={"port": split_address(first.address)[1]})
            second = first
            try:
                expected = scored(client, prompt, **asked)
                run = Run()
                request = client.request(prompt, prompt_logprobs=TOP_COUNT, temperature=0, **asked)
                for response in client.stub.Generate(request, timeout=120):
                    run.take(event_of(response))
                    if len(run.prompt_logprobs) == 3:
                        first.process.kill()
                        first.stop(0.0)
                        second = start("target", again)
                assert rows_of(run) == rows_of(expected)
                assert run.token_ids == expected.token_ids and run.statistics.num_target_changes >= 1
            finally:
                second.stop(0.0)
                client.close()
                own.stop()
