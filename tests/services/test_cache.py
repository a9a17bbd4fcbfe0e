"""Prefix caching and preemption through the running services: visible in speed and statistics, never in a text."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from specdec.engine.table_model import write_table_model
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import types_pb2 as types_pb
from tests.support.services import MODELS, Client, Outcome, Services, fixed, running

PROMPTS = [json.loads(line)["prompt"] for line in (MODELS / "heldout_prompts.jsonl").read_text().splitlines()[:3]]
BLOCK_SIZE = 16
TABLE_BYTES_PER_POSITION = 8


def retry_after_ms(error: grpc.RpcError) -> int:
    """The retry delay of a refusal; fails where there is none."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    for detail in status.details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            return retry.retry_delay.ToMilliseconds()
    raise AssertionError(f"no RetryInfo in {status}")


def outcome_or_refusal(client: Client, **asked) -> Outcome | grpc.RpcError:
    try:
        return client.generate(**asked)
    except grpc.RpcError as error:
        return error


@pytest.mark.more
def test_a_cache_for_eight_and_64_requests(table_models: tuple[Path, Path]) -> None:
    """Claim: of 64 requests at once, on a cache for eight of their length, every admitted one has the text it has
    alone, preempted ones too; the others are RESOURCE_EXHAUSTED with RetryInfo; afterwards requests are admitted.

    Source: reliability.md, "cache for 8, 64 requests". Conclusive: the statistics of the compared texts count
    preemptions.
    """
    length = 3 + 237
    block_count = 8 * -(-length // BLOCK_SIZE) + 1
    cache = {"kv_cache_bytes": block_count * BLOCK_SIZE * TABLE_BYTES_PER_POSITION, "block_size": BLOCK_SIZE}
    asked = {"max_tokens": 237, "temperature": 1, "ignore_eos": True}
    requests = [{"prompt": [1, 2, seed % 5 + 1], "seed": seed, **asked} for seed in range(8)]
    with running(*table_models, threads=1, **cache) as services:
        client = services.client
        with ThreadPoolExecutor(64) as pool:
            outcomes = list(pool.map(lambda request: outcome_or_refusal(client, **request), requests * 8))
        alone = [client.generate(**request).comparable for request in requests]
        taken = [(index % 8, outcome) for index, outcome in enumerate(outcomes) if isinstance(outcome, Outcome)]
        for error in outcomes:
            if isinstance(error, grpc.RpcError):
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and retry_after_ms(error) > 0
        assert len(taken) >= 8 and sum(outcome.finished.statistics.preemptions for _, outcome in taken) > 8
        for seed, outcome in taken:
            assert outcome.comparable == alone[seed], f"seed {seed}"
        described = client.stub.Describe(types_pb.DescribeRequest())
        assert described.target.cache.block_count == block_count - 1
        assert described.target.cache.block_size == BLOCK_SIZE


def test_long_requests_share_the_draft(tmp_path: Path) -> None:
    """Claim: six requests with a large `max_tokens` all draft at the same time on a draft whose cache holds two of that
    length. Source: each reserved the cache of its whole length, so later ones never drafted though it was hardly used.

    Conclusive: in every text draft tokens are accepted among the first 200, and no text is near its end then.
    """
    max_tokens = 4000
    cache = {"kv_cache_bytes": 2 * (max_tokens + 100) * TABLE_BYTES_PER_POSITION, "block_size": BLOCK_SIZE}
    asked = {"max_tokens": max_tokens, "temperature": 1, "ignore_eos": True}
    asked["speculative"] = fixed(4, draft_wait_ms=2000)  # one wait that expires would end them
    folders = [tmp_path / "target", tmp_path / "draft"]
    for seed, folder in enumerate(folders):
        write_table_model(folder, 7, positions_max=2 * max_tokens, seed=seed)
    with running(*folders, threads=1, draft=cache) as services:
        client = services.client
        requests = [client.request([1, 2], seed=seed, **asked) for seed in range(6)]
        calls = [client.stub.Generate(request, timeout=60) for request in requests]
        outcomes = [Outcome() for _ in calls]
        while any(len(outcome.token_ids) < 200 for outcome in outcomes):
            for call, outcome in zip(calls, outcomes):
                client.take(outcome, next(call))
        for call in calls:
            call.cancel()
    assert all(len(outcome.token_ids) < max_tokens // 2 for outcome in outcomes)
    accepted = [outcome.kinds[:200].count(pb.TOKEN_KIND_ACCEPTED) for outcome in outcomes]
    assert min(accepted) > 20, accepted


def test_a_request_that_could_never_fit_is_invalid(table_models: tuple[Path, Path]) -> None:
    """Claim: a request longer than the whole cache is INVALID_ARGUMENT naming the limit, and one that just fits is
    served. Conclusive: both sides of the limit."""
    blocks = {"kv_cache_bytes": 32 * BLOCK_SIZE * TABLE_BYTES_PER_POSITION, "block_size": 2 * BLOCK_SIZE}
    with running(table_models[0], None, threads=1, **blocks) as services:
        with pytest.raises(grpc.RpcError) as refused:
            services.client.generate([1, 2], max_tokens=479, ignore_eos=True)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "480" in refused.value.details() and "--kv-cache-bytes" in refused.value.details()
        assert len(services.client.generate([1, 2], max_tokens=478, ignore_eos=True).token_ids) == 478


@pytest.mark.more
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_prefix_that_is_cached_changes_no_text(dtype: str) -> None:
    """Claim: with and without prefix caching every text is the same, logprobs and usage included, with speculation and
    without; with it, later requests find the blocks of earlier ones, prompts and continuations both.

    Requirement: "identical text with and without". Conclusive: the shipped pair; the statistics count the hits, so the
    second runs did use cached prefixes; 0 hits without caching.
    """
    requests = [
        {"prompt": prompt * 3, "max_tokens": 32, "logprobs": 1, "speculative": speculative, **params}
        for prompt in PROMPTS
        for params in ({"temperature": 0}, {"temperature": 0.8, "seed": 7})
        for speculative in (fixed(0), fixed(4))
    ]
    outcomes: dict[bool, list[Outcome]] = {}
    for is_enabled in (True, False):
        own = {"enable_prefix_caching": is_enabled}
        with running(MODELS / "target", MODELS / "draft", threads=1, dtype=dtype, target=own) as services:
            client = services.client
            outcomes[is_enabled] = [client.generate(**request) for request in requests]
            if not is_enabled:
                continue
            first = outcomes[True][0]
            longer = client.generate(**requests[0], resume=first.token_ids[:30])
            assert longer.token_ids == first.token_ids[30:]
            assert longer.finished.statistics.cached_prompt_tokens >= first.finished.usage.prompt_tokens // 64 * 64
    assert [one.comparable for one in outcomes[True]] == [one.comparable for one in outcomes[False]]
    found = [outcome.finished.statistics.cached_prompt_tokens for outcome in outcomes[True]]
    assert not any(outcome.finished.statistics.cached_prompt_tokens for outcome in outcomes[False])
    for index, outcome in enumerate(outcomes[True]):
        whole = outcome.finished.usage.prompt_tokens // 64 * 64
        assert found[index] == 0 if index % 4 == 0 else found[index] >= whole - 64, f"request {index}"


def test_tenants_do_not_find_each_others_prefixes(table_services: Services) -> None:
    """Claim: requests of one salt find each other's prefixes and no others; no salt counts as a salt.

    Source: reliability.md, "no cross-tenant prefix sharing". Conclusive: the number of cached tokens of each request.
    """
    client, prompt = table_services.client, [1, 2, 3, 4] * 50
    found = [
        client.generate(prompt, cache_salt=salt, max_tokens=3, temperature=0, ignore_eos=True)
        for salt in ("", "a", "b", "", "a", "b", "c")
    ]
    counts = [outcome.finished.statistics.cached_prompt_tokens for outcome in found]
    assert counts == [0, 0, 0, 192, 192, 192, 0]
    assert len({tuple(outcome.token_ids) for outcome in found}) == 1
    with pytest.raises(grpc.RpcError) as refused:
        client.generate(prompt, cache_salt="s" * 129, max_tokens=3)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "cache_salt" in refused.value.details()
