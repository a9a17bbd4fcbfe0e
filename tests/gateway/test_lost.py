"""A target or a coordinator is lost under streams: real processes, SIGKILL. No client sees more than a pause."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specdec.config import TargetSettings, split_address
from specdec.engine.table_model import write_table_model
from specdec.launch.children import Child, start
from tests.support.gateways import Streaming, ask, events_of, gateway, metric, streamed_texts
from tests.support.services import Services, running
from tests.support.waiting import until

PATH = "/v1/completions"
TOKENS, POSITIONS = 200, 8192
STREAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "prompt": [1, 2], "speculative": {"rounds": True, "statistics": True}},
    {"seed": 1},
    {"seed": 2, "logprobs": 1},
    {"seed": -3, "speculative": {"enabled": False}},
    {"seed": 4, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"speculative": {"rule": "rejection"}},
    {"speculative": {"rule": "rejection"}, "temperature": 1.5},
]
ALWAYS = {"prompt": "<1><2><3>", "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
OPTIONS = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft table model: texts of hundreds of tokens in a second or two."""
    folder = tmp_path_factory.mktemp("tables")
    write_table_model(folder / "target", 7, POSITIONS, seed=1)
    write_table_model(folder / "draft", 7, POSITIONS, seed=2)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="module")
def services(models: tuple[Path, Path]) -> Iterator[Services]:
    """Services of all tests here: what a test ends it replaces."""
    with running(*models, {"draft_wait_ms": 50.0}, threads=1) as started:
        yield started


def undisturbed(address: str) -> list[dict[str, Any]]:
    """The whole answer of each stream's request."""
    with ThreadPoolExecutor(len(STREAMS)) as pool:
        return list(pool.map(lambda own: ask(address, PATH, ALWAYS | own).json["choices"][0], STREAMS))


def check_statistics(chunks: list[dict[str, Any]]) -> None:
    """The metrics of an answer are of its whole text: each of its tokens was accepted, or ended a round; where rounds
    came too, their sums are the statistics."""
    counts = chunks[-1]["metrics"]["speculative_decoding"]
    accepted = counts["num_accepted_draft_tokens"]
    assert sum(length * count for length, count in enumerate(counts["acceptance_histogram"])) == accepted
    told = [chunk["speculative"] for chunk in chunks if "speculative" in chunk]
    rounds = [own for part in told for own in part.get("rounds", [])]
    if not rounds:
        return
    (statistics,) = [part["statistics"] for part in told if "statistics" in part]
    assert len(rounds) == statistics["rounds"] and sum(own["num_output_tokens"] for own in rounds) == TOKENS
    assert sum(len(own["draft_token_ids"]) for own in rounds) == counts["num_draft_tokens"]
    assert sum(len(own["accepted"]) for own in rounds) == accepted == statistics["num_accepted_draft_tokens"]
    assert sum(own["round_s"] for own in rounds) == pytest.approx(statistics["time"]["total_s"], rel=1e-9)
    assert sum(own["target_forward_s"] for own in rounds) == statistics["time"]["target_forward_s"]


def run_and_check(address: str, expected: list[dict[str, Any]], at_event: int, lose: Any) -> int:
    """Runs all streams, calls `lose` at event `at_event` of all, and checks what every client got. Returns how many
    streams were running then."""
    streams = [Streaming(address, PATH, ALWAYS | own | OPTIONS) for own in STREAMS]
    until(lambda: sum(stream.event_count for stream in streams) >= at_event, 60.0)
    running_count = sum(not stream.has_ended for stream in streams)
    lose()
    until(lambda: ask(address, "/health").status == 200, 120.0)  # requests below need a coordinator with a target
    for own, whole, stream in zip(STREAMS, expected, streams):
        chunks = events_of(stream.result())
        (text,) = streamed_texts(chunks)
        assert text.reason == "length" and len(text.token_ids) == TOKENS
        assert chunks[-1]["usage"]["completion_tokens"] == TOKENS
        check_statistics(chunks)
        if own.get("speculative", {}).get("rule") == "rejection":
            assert text.text == ask(address, "/detokenize", {"tokens": text.token_ids}).json["prompt"].replace(
                "<|end|>", ""
            )
        else:
            assert (text.text, text.token_ids) == (whole["text"], whole["token_ids"])
            assert len(text.logprobs) == (TOKENS if own.get("logprobs") else 0)
    return running_count


def lost_target(services: Services, models: tuple[Path, Path], points: list[int]) -> int:
    """Kills the target at each of some points and starts it again; returns the streams that ran then."""
    settings = TargetSettings(model=str(models[0]), port=0, threads=1, log_level="error")
    with start("target", settings) as first:
        own, client = services.start_coordinator(target=first.wait_ready())
        target: Child = first
        again = settings.model_copy(update={"port": split_address(first.address)[1]})
        try:
            with gateway(own.address, model=models[0], resume_timeout_s=200.0) as child:
                expected = undisturbed(child.address)
                running_count = 0
                for point in points:

                    def lose() -> None:
                        nonlocal target
                        target.process.kill()
                        target.stop(0.0)
                        target = start("target", again)

                    running_count += run_and_check(child.address, expected, point, lose)
                assert metric(child.address, "specdec_gateway_resumptions_total") >= len(points)
                return running_count
        finally:
            target.stop(0.0)
            client.close()
            own.stop()


@pytest.mark.more
def test_a_lost_target_is_a_pause(services: Services, models: tuple[Path, Path]) -> None:
    """Claim: when the target is killed under 8 streams and comes back, no client sees an error; under GREEDY and
    COUPLED each text is, byte for byte, the undisturbed one, under REJECTION no token is doubled or missing.

    Conclusive: SIGKILL while tokens arrive; streams of all three rules; ids and text are compared to those of the same
    request before, or counted and decoded again.
    """
    assert lost_target(services, models, [60]) >= 4


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_target_may_be_lost_at_any_point(services: Services, models: tuple[Path, Path]) -> None:
    """Claim: as before, at 50 points from the first event on."""
    draw = random.Random(5)
    assert lost_target(services, models, [1, 2, 3, *(draw.randint(1, 400) for _ in range(47))]) >= 200


@pytest.mark.lengthy
def test_a_lost_coordinator_is_a_pause(services: Services, models: tuple[Path, Path]) -> None:
    """Claim: when a coordinator is killed and a second one is listed, its streams go on there at once, by the same
    claim as for a target; new requests go there too."""
    killed, client = services.start_coordinator()
    client.close()
    with gateway(killed.address, services.coordinator.address, model=models[0]) as child:
        expected = undisturbed(child.address)

        def lose() -> None:
            killed.process.kill()
            killed.stop(0.0)

        assert run_and_check(child.address, expected, 40, lose) >= 4
        assert metric(child.address, "specdec_gateway_resumptions_total") >= 2, "none ran there"
        assert ask(child.address, PATH, ALWAYS | {"max_tokens": 5}).status == 200


def test_a_loss_that_lasts_is_an_error_event(services: Services, models: tuple[Path, Path]) -> None:
    """Claim: when nothing takes the place of a lost coordinator, a stream ends with an error event of code
    target_unavailable, no [DONE] and no reason of an end, a whole answer and a new request with 503; health says so."""
    killed, client = services.start_coordinator()
    client.close()
    with gateway(killed.address, model=models[0], resume_timeout_s=1.0) as child:
        stream = Streaming(child.address, PATH, ALWAYS | {"max_tokens": 4000})
        until(lambda: stream.event_count > 10)
        killed.process.kill()
        killed.stop(0.0)
        *events, last, rest = stream.result().decode().split("\n\n")
        assert rest == "" and '"code": "target_unavailable"' in last and "[DONE]" not in last
        assert not any("[DONE]" in event or '"finish_reason":"' in event for event in events)
        refused = ask(child.address, PATH, ALWAYS)
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.error["type"] == "server_error"
        until(lambda: ask(child.address, "/health").status == 503)


@pytest.mark.more
def test_a_silent_stream_gets_comments(services: Services, models: tuple[Path, Path]) -> None:
    """Claim: a stream that has nothing to say for 10 s, here as its coordinator is gone, gets a comment, which readers
    of events pass over, and the error event at its end."""
    killed, client = services.start_coordinator()
    client.close()
    with gateway(killed.address, model=models[0], resume_timeout_s=14.0) as child:
        stream = Streaming(child.address, PATH, ALWAYS | {"max_tokens": 4000})
        until(lambda: stream.event_count > 10)
        killed.process.kill()
        killed.stop(0.0)
        body = stream.result()
        assert body.count(b": ping\n\n") == 1 and body.index(b": ping") < body.index(b"target_unavailable")


def test_a_full_coordinator_is_passed_over(services: Services, models: tuple[Path, Path]) -> None:
    """Claim: with all places taken at one coordinator a request goes to the next; with all taken everywhere it is 503
    `overloaded` with Retry-After."""
    small, client = services.start_coordinator(max_num_seqs=1)
    other, other_client = services.start_coordinator(max_num_seqs=1)
    try:
        with gateway(small.address, other.address, model=models[0]) as child:
            body = ALWAYS | {"max_tokens": 3000}
            held = client.stub.Generate(client.request([1], max_tokens=3000, ignore_eos=True))
            assert next(held).HasField("started")
            streams = [Streaming(child.address, PATH, body)]
            assert streams[0].status == 200
            refused = ask(child.address, PATH, ALWAYS)
            assert (refused.status, refused.error["code"]) == (503, "overloaded")
            assert int(refused.headers["retry-after"]) >= 1
            held.cancel()
            streams[0].leave()
    finally:
        for end in (client.close, other_client.close, small.stop, other.stop):
            end()
