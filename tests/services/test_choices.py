"""Several choices of one request, through real services: each is the single request with seed + i."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from specdec.config import split_address
from specdec.engine.table_model import write_table_model
from specdec.launch.children import start
from specdec.settings import flag_of
from specdec.v1 import coordinator_service_pb2 as pb
from tests.services.test_bad_input import details
from tests.support.services import SHAPES, Client, Outcome, Services, running
from tests.support.waiting import until

SEED = 2**64 - 2  # the third choice has seed 0


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
    found = client.choices(prompt, n=4, **asked)
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
    first, again = (shipped_pair.client.choices([5, 6, 7], n=3, **asked) for _ in range(2))
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
    found = shipped_pair.client.choices(prompt, n=count, max_tokens=4, temperature=0)
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
                client.choices([1, 2], n=4, max_tokens=2)
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
                return len(client.choices([1, 2], n=4, max_tokens=2)) == 4
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
    found = shipped_pair.client.choices("Once upon", **asked)
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


def test_a_choice_that_fails_ends_no_other(tmp_path: Path) -> None:
    """Claim: a choice that fails does not end the others: each of them is its single request, and then the stream ends
    with the error of the failed one.

    Conclusive: the model's logits after a rare token are no numbers, so a choice fails where it draws that one; the
    singles tell which fail and what the others are.
    """
    size, rare, count = 7, 6, 16
    logits = torch.zeros(size + 1, size + 1, size)
    logits[..., rare] = -4.0
    logits[..., rare, :] = float("nan")
    write_table_model(tmp_path / "model", size, logits=logits)
    asked = {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True}
    with running(tmp_path / "model", None, threads=1) as services:
        client = services.client
        singles: list[Outcome | None] = []
        for index in range(count):
            try:
                singles.append(client.generate([1, 2], seed=index, **asked))
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.INTERNAL
                singles.append(None)
        assert 2 <= singles.count(None) <= count - 2
        found = [Outcome() for _ in range(count)]
        with pytest.raises(grpc.RpcError, match="not-a-number") as caught:
            for response in client.stub.Generate(client.request([1, 2], n=count, seed=0, **asked)):
                client.take(found[response.choice], response)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        for own, single in zip(found, singles):
            assert (own.finished is None) == (single is None)
            if single is not None:
                assert own.comparable == single.comparable
        assert client.generate([1, 2], seed=0, max_tokens=1).token_ids


def test_choices_outlive_their_coordinator(tmp_path: Path) -> None:
    """Claim: when the coordinator of three choices is killed and started again on its port, `specdec generate` resumes
    each by itself: one start, every token once and one end of each, and it is, byte for byte, its single request.

    Conclusive: the coordinator is ended by SIGKILL while tokens of all three come; the singles are made by the other
    one, without speculation.
    """
    tokens = 900
    write_table_model(tmp_path / "model", 7, tokens + 100)
    with running(tmp_path / "model", None, threads=1) as services:
        killed = services.coordinator
        command = [sys.executable, "-m", "specdec.cli", "generate", "<1><2>", "--json", "--address", killed.address]
        command += ["--max-tokens", str(tokens), "--ignore-eos", "--n", "3"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as own:
            assert own.stdout
            read = [own.stdout.readline() for _ in range(60)]
            killed.process.kill()
            killed.stop(0.0)
            settings = services.settings.model_copy(update={"port": split_address(killed.address)[1]})
            with start("coordinator", settings) as again:
                messages: list[list[dict[str, Any]]] = [[], [], []]
                for line in (*read, *own.stdout):
                    message = json.loads(line)
                    messages[message.pop("choice", 0)].append(message)
                own.wait()
                client = Client(again.wait_ready())
                for choice in messages:
                    sampling = {"ignore_eos": True, "max_tokens": tokens, "seed": int(choice[0]["started"]["seed"])}
                    whole = client.generate("<1><2>", speculative={"enabled": False}, **sampling)
                    deltas = [message["delta"] for message in choice[1:-1]]
                    assert [token for delta in deltas for token in delta["token_ids"]] == whole.token_ids
                    assert "".join(delta.get("text", "") for delta in deltas) == whole.text
                    assert choice[-1]["finished"]["usage"]["output_tokens"] == tokens
                    assert choice[-1]["finished"]["statistics"]["rounds"] >= tokens
                client.close()
    assert own.returncode == 0
    seeds = [int(choice[0]["started"]["seed"]) for choice in messages]
    assert seeds == [(seeds[0] + index) % 2**64 for index in range(3)]
    assert sum(bool("started" in message) for choice in messages for message in choice) == 3
    assert any(json.loads(line).get("choice") == 2 and "delta" in json.loads(line) for line in read)
