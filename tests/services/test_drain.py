"""SIGTERM under load: real processes, real signals. Running requests finish, new ones are refused, the error of an
unfinished one says how to resume; texts are those of an undisturbed run, byte by byte, and the exit code is 0."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.config import TargetSettings
from specdec.launch.children import start
from specdec.protocol.types import TokenKind
from tests.support.services import Client, Outcome, Services, fixed, running
from tests.support.waiting import until

PROMPT = [1, 2, 3]
ASKED = {"max_tokens": 450, "temperature": 1, "ignore_eos": True, "speculative": fixed(2)}
WIDTH = 4
LONG_S = 60.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@contextmanager
def services(models: tuple[Path, Path], role: str, grace_s: float) -> Iterator[Services]:
    """Services of which one has this grace."""
    with running(*models, threads=1, **{role: {"drain_grace_s": grace_s}}) as started:
        yield started


class Load:
    """Generations of different seeds under way, and what each came to: its outcome, and the error that ended it."""

    def __init__(self, client: Client, width: int = WIDTH) -> None:
        self.client = client
        self.outcomes = [Outcome() for _ in range(width)]
        self.pool = ThreadPoolExecutor(width)
        self.futures: list[Future[grpc.RpcError | None]] = [self.pool.submit(self._run, at) for at in range(width)]

    def _run(self, seed: int) -> grpc.RpcError | None:
        request = self.client.request(PROMPT, **ASKED, seed=seed)
        try:
            for response in self.client.stub.Generate(request, timeout=100):
                self.client.take(self.outcomes[seed], response)
        except grpc.RpcError as error:
            return error
        return None

    def is_running(self, token_count: int = 10) -> bool:
        """Whether all have `token_count` tokens; fails when one has ended."""
        assert not any(future.done() for future in self.futures), "a generation ended too soon for this test"
        return all(len(outcome.token_ids) >= token_count for outcome in self.outcomes)

    def ends(self) -> list[grpc.RpcError | None]:
        """Waits for all and returns the error of each, None where it finished."""
        found = [future.result(100) for future in self.futures]
        self.pool.shutdown()
        return found


def health(address: str) -> int:
    """The answer of the health service at an address."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5).status


def retry_s(error: grpc.RpcError) -> float:
    """What RetryInfo says."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    return retry.retry_delay.ToMilliseconds() / 1000


def refused(client: Client) -> grpc.RpcError:
    """The error a new request meets; it must not be taken in."""
    with pytest.raises(grpc.RpcError) as caught:
        client.generate(PROMPT, max_tokens=3, ignore_eos=True)
    return caught.value


@pytest.fixture(scope="module")
def expected(table_models: tuple[Path, Path]) -> list[Outcome]:
    """The texts, undisturbed and without speculation, by seed."""
    with running(table_models[0], None, threads=1) as plain:
        asked = {**ASKED, "speculative": {"enabled": False}}
        return [plain.client.generate(PROMPT, **asked, seed=seed) for seed in range(WIDTH)]


def check_texts(load: Load, expected: list[Outcome]) -> None:
    """All ended as they would have undisturbed."""
    assert load.ends() == [None] * WIDTH
    assert [one.comparable for one in load.outcomes] == [one.comparable for one in expected]


@pytest.mark.more
def test_a_target_finishes_its_sessions(table_models: tuple[Path, Path], expected: list[Outcome]):
    """Claim: a stopping target reports NOT_SERVING at once, finishes every session it has, takes no new one, and exits
    with 0 when the last ends, long before its grace. Meanwhile the coordinator is NOT_SERVING and refuses requests
    UNAVAILABLE with a time to wait. Conclusive: all texts equal those of an undisturbed run."""
    with services(table_models, "target", LONG_S) as started:
        load = Load(started.client)
        until(load.is_running)
        started.target.signal(signal.SIGTERM)
        until(lambda: health(started.target.address) == NOT_SERVING, 2.0)
        until(lambda: health(started.coordinator.address) == NOT_SERVING, 2.0)
        error = refused(started.client)
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "stops" in error.details()
        assert retry_s(error) > 0
        assert load.is_running(), "the refused request came while all others ran"
        check_texts(load, expected)
        assert started.target.process.wait(10) == 0


@pytest.mark.slow
def test_a_target_gives_up_what_outlasts_its_grace(table_models: tuple[Path, Path], expected: list[Outcome]):
    """Claim: a generation not finished within the grace ends UNAVAILABLE and its error says how to resume; the target
    exits with 0; on its successor every text goes on where it broke off."""
    with services(table_models, "target", 0.0) as started:
        load = Load(started.client)
        until(load.is_running)
        started.target.signal(signal.SIGTERM)
        assert started.target.process.wait(10) == 0
        for seed, error in enumerate(load.ends()):
            assert error is not None and error.code() is grpc.StatusCode.UNAVAILABLE
            count = len(load.outcomes[seed].token_ids)
            assert f"resume.output_token_ids, the {count} received so far and seed {seed}" in error.details()
        port = int(started.target.address.rpartition(":")[2])
        settings = TargetSettings(model=str(table_models[0]), port=port, threads=1, log_level="error")
        with start("target", settings) as successor:
            successor.wait_ready()
            until(lambda: health(started.coordinator.address) == SERVING)
            check_resumed(started.client, load, expected)


def check_resumed(client: Client, load: Load, expected: list[Outcome]) -> None:
    """Received and resumed parts together are the expected texts."""
    for seed, outcome in enumerate(load.outcomes):
        rest = client.generate(PROMPT, **ASKED, seed=seed, resume=outcome.token_ids)
        assert outcome.token_ids + rest.token_ids == expected[seed].token_ids
        assert outcome.text + rest.text == expected[seed].text


@pytest.mark.more
def test_a_draft_finishes_its_sessions(table_models: tuple[Path, Path], expected: list[Outcome]):
    """Claim: a stopping draft continues to draft for its sessions and takes no new one; new requests go on without it;
    it exits with 0 when the last session ends. Conclusive: a generation begun after the signal has no draft token,
    those begun before have accepted draft tokens among their last hundred, and all texts are as expected. The draft is
    the target's own model here, so all its tokens are accepted."""
    with services((table_models[0], table_models[0]), "draft", LONG_S) as started:
        load = Load(started.client)
        until(load.is_running)
        started.draft.signal(signal.SIGTERM)
        until(lambda: health(started.draft.address) == NOT_SERVING, 2.0)
        late = started.client.generate(PROMPT, **{**ASKED, "max_tokens": 9}, seed=0)
        assert load.is_running(), "the late request came while all others ran"
        assert late.finished.statistics.num_draft_tokens == 0
        assert late.token_ids == expected[0].token_ids[:9]
        assert health(started.coordinator.address) == SERVING
        check_texts(load, expected)
        assert all(TokenKind.ACCEPTED.value in one.kinds[-100:] for one in load.outcomes)
        assert started.draft.process.wait(10) == 0
        after = started.client.generate(PROMPT, **ASKED, seed=1)
        assert after.comparable == expected[1].comparable


@pytest.mark.more
def test_a_coordinator_finishes_its_streams(table_models: tuple[Path, Path], expected: list[Outcome]):
    """Claim: a stopping coordinator is NOT_SERVING at once, refuses requests UNAVAILABLE with a time to wait,
    finishes every stream it has, and exits with 0."""
    with services(table_models, "coordinator", LONG_S) as started:
        load = Load(started.client)
        until(load.is_running)
        started.coordinator.signal(signal.SIGTERM)
        until(lambda: health(started.coordinator.address) == NOT_SERVING, 2.0)
        error = refused(started.client)
        assert error.code() is grpc.StatusCode.UNAVAILABLE and retry_s(error) > 0
        assert load.is_running(), "the refused request came while all others ran"
        check_texts(load, expected)
        assert started.coordinator.process.wait(10) == 0


@pytest.mark.more
def test_a_coordinator_says_how_to_resume_what_outlasts_its_grace(
    table_models: tuple[Path, Path], expected: list[Outcome]
):
    """Claim: when the grace is over, a stream gets all tokens that were committed, then UNAVAILABLE with their number
    and its seed; another coordinator on the same replicas goes on from there; exit code 0."""
    with services(table_models, "coordinator", 0.0) as started:
        load = Load(started.client)
        until(load.is_running)
        started.coordinator.signal(signal.SIGTERM)
        for seed, error in enumerate(load.ends()):
            assert error is not None and error.code() is grpc.StatusCode.UNAVAILABLE
            count = len(load.outcomes[seed].token_ids)
            assert f"the {count} received so far and seed {seed}" in error.details()
            assert retry_s(error) > 0
        assert started.coordinator.process.wait(10) == 0
        second, client = started.start_coordinator()
        with second:
            check_resumed(client, load, expected)
            client.close()
