"""A client's view of a replica that dies, freezes or loses its state: real processes, real signals.

Under GREEDY and COUPLED the text is known from an undisturbed run, so "generation goes on" is checked byte by byte.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from specdec.config import DraftSettings, TargetSettings, split_address
from specdec.engine.table_model import write_table_model
from specdec.launch.children import Child, start
from specdec.v1 import types_pb2 as types_pb
from tests.support.services import Client, Outcome, Services, running
from tests.support.waiting import until

PROMPT = [1, 2, 3]
ASKED = {"max_tokens": 400, "temperature": 1, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def services(table_models: tuple[Path, Path]) -> Iterator[Services]:
    """Services of all tests: what a test ends is its own."""
    with running(*table_models, {"draft_wait_ms": 50.0}, threads=1, max_num_seqs=8) as started:
        yield started


@contextlib.contextmanager
def with_own(services: Services, role: str, settings: DraftSettings | TargetSettings) -> Iterator[tuple[Child, Client]]:
    """A replica that a test may end, and a client of a coordinator that has it in place of the common one."""
    with start(role, settings) as replica:
        coordinator, client = services.start_coordinator(**{role: replica.wait_ready()})
        try:
            yield replica, client
        finally:
            client.close()
            coordinator.stop()


def draft_settings(table_models: tuple[Path, Path]) -> DraftSettings:
    return DraftSettings(model=str(table_models[1]), port=0, threads=1, log_level="warning")


def on_its_port(replica: Child, settings: DraftSettings | TargetSettings) -> DraftSettings | TargetSettings:
    """The settings of a replica that takes the place of one that ended."""
    return settings.model_copy(update={"port": split_address(replica.address)[1]})


def stream(client: Client, at_token: int, act: Callable[[], None], **asked) -> Outcome:
    """A generation during which `act` is called once `at_token` tokens have come."""
    outcome, acted = Outcome(), False
    for response in client.stub.Generate(client.request(PROMPT, **{**ASKED, **asked}), timeout=60):
        client.take(outcome, response)
        if not acted and len(outcome.token_ids) >= at_token:
            acted = True
            act()
    assert acted
    return outcome


@pytest.mark.more
def test_the_draft_may_die_at_any_moment_and_drafting_resumes(services: Services, table_models: tuple[Path, Path]):
    """Claim: SIGKILL of the draft at many points changes no token; a draft that is back on its port is used again."""
    settings = draft_settings(table_models)
    with with_own(services, "draft", settings) as (first, client):
        expected = client.generate(PROMPT, **ASKED, speculative={"enabled": False})
        draft, again = first, on_its_port(first, settings)
        for at_token in (1, 50, 177):
            outcome = stream(client, at_token, partial(draft.signal, signal.SIGKILL))
            assert outcome.comparable == expected.comparable, f"killed at token {at_token}"
            draft.stop()
            draft = start("draft", again)
            draft.wait_ready()

            def drafts_again() -> bool:
                outcome = client.generate(PROMPT, **{**ASKED, "max_tokens": 40})
                return outcome.finished.statistics.num_draft_tokens > 0

            until(drafts_again)
        draft.stop()


def test_drafting_resumes_within_a_running_generation(services: Services, table_models: tuple[Path, Path]):
    """Claim: a generation that lost its draft uses the next one, without being started again."""
    settings = draft_settings(table_models)
    with contextlib.ExitStack() as stack:
        first, client = stack.enter_context(with_own(services, "draft", settings))
        first.stop()
        until(lambda: client.generate(PROMPT, max_tokens=30).finished.statistics.num_draft_tokens == 0)
        drafts = []

        def revive() -> None:
            drafts.append(stack.enter_context(start("draft", on_its_port(first, settings))))

        asked = {**ASKED, "max_tokens": 100}
        outcome = stream(client, 1, revive, max_tokens=100)
        drafts[0].wait_ready()
        until(lambda: client.generate(PROMPT, **asked).finished.statistics.num_draft_tokens > 0)
        whole = client.generate(PROMPT, **{**ASKED, "max_tokens": 450})
        assert whole.token_ids[:100] == outcome.token_ids


def test_a_frozen_draft_costs_a_moment_and_no_token(services: Services):
    """Claim: SIGSTOP of the draft is waited for once, not once per round; after SIGCONT it is used again."""
    client = services.client
    expected = client.generate(PROMPT, **ASKED, speculative={"enabled": False})
    try:
        outcome = stream(client, 20, lambda: services.draft.signal(signal.SIGSTOP))
    finally:
        services.draft.signal(signal.SIGCONT)
    assert outcome.comparable == expected.comparable
    assert outcome.finished.statistics.draft_waits_expired <= 3
    until(lambda: client.generate(PROMPT, **ASKED).finished.statistics.num_draft_tokens > 0)


def test_losing_the_target_is_unavailable_with_what_is_needed_to_resume(
    services: Services, table_models: tuple[Path, Path]
):
    """Claim: UNAVAILABLE within 2 s, and the resumed text goes on exactly where it broke off."""
    settings = TargetSettings(model=str(table_models[0]), port=0, threads=1, log_level="warning")
    with with_own(services, "target", settings) as (first, client):
        expected = client.generate(PROMPT, **ASKED, speculative={"enabled": False})
        outcome, killed_s = Outcome(), 0.0
        with pytest.raises(grpc.RpcError) as caught:
            for response in client.stub.Generate(client.request(PROMPT, **ASKED), timeout=60):
                client.take(outcome, response)
                if len(outcome.token_ids) > 30 and not killed_s:
                    killed_s = time.monotonic()
                    first.signal(signal.SIGKILL)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - killed_s < 2
        assert "resume" in caught.value.details()
        first.stop()
        with pytest.raises(grpc.RpcError) as refused:
            client.generate(PROMPT, max_tokens=5)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

        def resumed() -> bool:
            try:
                rest = client.generate(PROMPT, resume=outcome.token_ids, **ASKED)
            except grpc.RpcError:
                return False
            assert outcome.token_ids + rest.token_ids == expected.token_ids
            assert outcome.text + rest.text == expected.text
            return True

        with start("target", on_its_port(first, settings)) as second:
            second.wait_ready()
            until(resumed)


def test_a_draft_that_cannot_hold_the_session_is_asked_once(services: Services, table_models: tuple[Path, Path]):
    """Claim (design section 8): a draft whose context is too short drafts up to its limit, or not at all; the text is
    the target's, and requests to the draft are not repeated: the bytes over its link are bounded."""
    settings = draft_settings(table_models).model_copy(update={"max_model_len": 16})
    with with_own(services, "draft", settings) as (_, client):
        asked = {"max_tokens": 200, "temperature": 1, "seed": 5, "ignore_eos": True}
        for prompt in ([1, 2, 3], [1, 2, 3] * 100):
            expected = client.generate(prompt, **asked, speculative={"enabled": False})
            outcome = client.generate(prompt, **asked)
            assert outcome.comparable == expected.comparable
            assert outcome.finished.statistics.draft_link_bytes < 10_000
            assert outcome.finished.statistics.draft_waits_expired <= 1  # where its context ends in a round


@pytest.mark.more
def test_a_draft_with_another_tokenizer_is_not_used(table_models: tuple[Path, Path], tmp_path: Path):
    """Claim: a running coordinator does not use such a draft and says why; generation goes on without it."""
    write_table_model(tmp_path / "other", 9, seed=2)
    with running(table_models[0], tmp_path / "other", threads=1) as services:
        outcome = services.client.generate(PROMPT, max_tokens=20, ignore_eos=True)
        assert outcome.finished.statistics.num_draft_tokens == 0 and len(outcome.token_ids) == 20
        described = services.client.stub.Describe(types_pb.DescribeRequest())
        assert not described.HasField("draft") and "tokenizer" in described.draft_absent_reason


@pytest.mark.slow
def test_a_reader_that_takes_nothing_loses_its_place(table_models: tuple[Path, Path]):
    """Claim: after 30 s a stalled reader's generation is ended and its slot is free; it takes 40 s to see."""
    with running(*table_models, coordinator={"max_num_seqs": 1}, threads=1) as services:
        client = services.client
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]  # little fits on the way
        channel = grpc.insecure_channel(services.coordinator.address, options=options)
        request = client.request(PROMPT, **{**ASKED, "logprobs": 7}).SerializeToString()
        stalled = channel.unary_stream("/specdec.v1.CoordinatorService/Generate")(request, timeout=300)
        next(stalled)  # it has the only slot

        def is_free() -> bool:
            try:
                return len(client.generate(PROMPT, max_tokens=3, ignore_eos=True).token_ids) == 3
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                return False

        assert not is_free()
        until(is_free, timeout_s=60)
        with pytest.raises(grpc.RpcError) as caught:
            list(stalled)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        channel.close()


def test_a_cancelled_generation_gives_its_blocks_back(services: Services):
    """Claim: work for a client that is gone stops; all 8 slots and their blocks are free for others."""
    client = services.client
    for _ in range(40):
        call = client.stub.Generate(client.request(PROMPT, **ASKED), timeout=60)
        next(call)
        call.cancel()

    def all_slots_are_free() -> bool:
        try:
            outcomes = client.generate_all([{"prompt": PROMPT, **ASKED, "max_tokens": 40}] * 8, width=8)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            return False
        return all(len(outcome.token_ids) == 40 for outcome in outcomes)

    until(all_slots_are_free)
    assert all_slots_are_free()


def test_sigterm_lets_running_generations_finish(services: Services):
    """Claim: a stopping coordinator refuses new work, finishes what runs within the grace, and exits with 0."""
    coordinator, client = services.start_coordinator()
    with coordinator, contextlib.closing(client):
        outcome = stream(client, 5, lambda: coordinator.signal(signal.SIGTERM), max_tokens=60)
        assert len(outcome.token_ids) == 60
        assert coordinator.process.wait(10) == 0
