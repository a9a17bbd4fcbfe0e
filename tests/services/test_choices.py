"""Several choices of one request, through real services: each is the single request with seed + i."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import grpc
import pytest

from specdec.cli.options import flag_of
from specdec.v1 import coordinator_service_pb2 as pb
from tests.services.test_bad_input import details
from tests.support.services import SHAPES, Client, Outcome, Services
from tests.support.waiting import until

SEED = 2**64 - 2  # the third choice has seed 0


def choices_of(client: Client, prompt: Any, **asked: Any) -> list[Outcome]:
    """Runs a request to its end and returns what came of each choice; fails if one has an event before all started."""
    outcomes = [Outcome() for _ in range(asked["n"])]
    started = 0
    for response in client.stub.Generate(client.request(prompt, **asked), timeout=120):
        started += response.HasField("started")
        assert response.HasField("started") or started == len(outcomes)
        assert outcomes[response.choice].finished is None
        client.take(outcomes[response.choice], response)
    return outcomes


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "speculative": SHAPES["chain"]},
    "coupled": {"seed": SEED, "speculative": SHAPES["tree"]},
    "coupled, siblings": {"seed": SEED, "speculative": SHAPES["waiting siblings"], "temperature": 0.8},
    "all proposers": {"seed": SEED, "speculative": SHAPES["all proposers"], "frequency_penalty": 0.5},
    "logprobs": {"seed": SEED, "logprobs": 3, "temperature": 1.3},
    "stops": {"seed": SEED, "stop": ["the", ".", "\n"], "stop_token_ids": [5], "min_tokens": 3},
    "off": {"seed": SEED, "speculative": {"enabled": False}, "logprobs": 0},
}


@pytest.mark.parametrize("case", CASES)
def test_a_choice_is_the_single_request(shipped_pair: Services, case: str) -> None:
    """Claim: choice i of n is the single request with seed + i modulo 2^64: ids, text, reason of the end, usage and
    log-probabilities, bit for bit, under GREEDY and COUPLED, with draft, trees, penalties and stops. Under GREEDY all
    are equal, under COUPLED they differ.

    Conclusive: every value is compared exactly with that of the singles, on the real pair.
    """
    asked, client, prompt = {"max_tokens": 24, **CASES[case]}, shipped_pair.client, "def main():\n    "
    found = choices_of(client, prompt, n=4, **asked)
    singles = []
    for index, own in enumerate(found):
        seed = {"seed": (SEED + index) & (2**64 - 1)} if "seed" in asked else {}
        singles.append(client.generate(prompt, **(asked | seed)))
        assert own.comparable == singles[-1].comparable
        assert own.started.seed == singles[-1].started.seed or "seed" not in asked
        assert (own.started.rule, own.started.request_id) == (singles[-1].started.rule, found[0].started.request_id)
        assert own.finished.trace_id == found[0].finished.trace_id
    assert len({tuple(own.token_ids) for own in found}) == (1 if case == "greedy" else 4)


def test_a_drawn_seed_is_told_for_each_choice(shipped_pair: Services) -> None:
    """Claim: without a seed the server draws one, and choice i has it + i: the single request with the seed that its
    start tells is the choice; two requests have other seeds."""
    asked = {"max_tokens": 12, "speculative": {"rule": "RULE_COUPLED"}}
    first, again = (choices_of(shipped_pair.client, [5, 6, 7], n=3, **asked) for _ in range(2))
    assert first[0].started.seed != again[0].started.seed
    for index, own in enumerate(first):
        assert own.started.seed == (first[0].started.seed + index) & (2**64 - 1)
        single = shipped_pair.client.generate([5, 6, 7], max_tokens=12, seed=own.started.seed)
        assert own.comparable == single.comparable


@pytest.mark.parametrize("count", [2, 4, 16])
def test_the_prompt_is_computed_once(shipped_pair: Services, count: int) -> None:
    """Claim: of a prompt of 1,000 tokens, n choices compute at most 1,000 + (n - 1) blocks.

    Conclusive: what the target itself says that it found in its cache, of each choice; the prompt is new to it.
    """
    block = shipped_pair.client.described().target.cache.block_size
    prompt = [(7 * index * index + count) % 4000 for index in range(1000)]
    found = choices_of(shipped_pair.client, prompt, n=count, max_tokens=4, temperature=0)
    cached = [own.finished.statistics.cached_prompt_tokens for own in found]
    assert cached[0] == 0 and sum(len(prompt) - own for own in cached) <= len(prompt) + (count - 1) * block
    assert {own.finished.usage.prompt_tokens for own in found} == {1000}


def test_places_are_taken_together(table_services: Services) -> None:
    """Claim: a request whose choices do not all find a place is refused as one, with a delay, and takes none; more
    choices than there are places are INVALID_ARGUMENT. A call that is cancelled in mid-text frees all its places.

    Conclusive: with 4 places and one taken, 4 choices are refused and 3 accepted; the refused ones leave the places to
    them.
    """
    with table_services.coordinator_with(max_num_seqs=4) as client:
        held = client.stub.Generate(client.request([1], max_tokens=400, ignore_eos=True))
        assert next(held).HasField("started")
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as caught:
                choices_of(client, [1, 2], n=4, max_tokens=2)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert any(own.type_url.endswith("RetryInfo") for own in details(caught.value).details)
        three = client.stub.Generate(client.request([1, 2], n=3, max_tokens=400, ignore_eos=True))
        while not next(three).HasField("delta"):
            pass
        with pytest.raises(grpc.RpcError, match="places"):
            client.generate([1], max_tokens=1)
        three.cancel()
        held.cancel()

        def all_are_free() -> bool:
            try:
                return len(choices_of(client, [1, 2], n=4, max_tokens=2)) == 4
            except grpc.RpcError:
                return False

        until(all_are_free)
        with pytest.raises(grpc.RpcError, match="at most this server's places") as caught:
            client.generate([1], n=5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_n_is_of_a_new_text(table_services: Services) -> None:
    """Claim: choices of a text that is resumed are refused, and n 1 sends no choice."""
    with pytest.raises(grpc.RpcError, match="sampling.n is 2; it must be 1 with resume"):
        table_services.client.generate([1], n=2, resume=[1])
    request = table_services.client.request([1], n=1, max_tokens=3)
    assert {response.choice for response in table_services.client.stub.Generate(request)} == {0}
    assert pb.GenerateResponse().choice == 0


def test_the_command_prints_choices_one_after_another(shipped_pair: Services) -> None:
    """Claim: `specdec generate --n 3` prints the choices in order, each below a heading with its seed, and the texts
    are those of the messages; with --json each message tells its choice.

    Conclusive: the printed text is built again from what gRPC gives for the same request.
    """
    asked = {"n": 3, "max_tokens": 16, "seed": 11}
    found = choices_of(shipped_pair.client, "Once upon", **asked)
    flags = ["Once upon", *(part for name, value in asked.items() for part in (flag_of(name), str(value)))]
    command = [sys.executable, "-m", "specdec.cli", "generate", *flags, "--address", shipped_pair.client.address]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parts = [f"--- choice {index}, seed {11 + index} ---\n{own.text}\n" for index, own in enumerate(found)]
    assert printed == "\n".join(parts)
    lines = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout.splitlines()
    texts = ["", "", ""]
    for message in map(json.loads, lines):
        texts[message.get("choice", 0)] += message.get("delta", {}).get("text", "")
    assert texts == [own.text for own in found]
