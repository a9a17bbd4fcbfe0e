"""Real services on emulated machines: reached over the emulated network, and slowed down by it."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import grpc
import pytest

from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.harness import running
from tests.support.network.machines import Network
from tests.support.processes import cpu_seconds, set_priority
from tests.support.samples import Sample, measure
from tests.support.table_models import table_models
from tests.support.variants import OFF, Variant, synchronous

GREEDY = "GREEDY, temperature 0"
PROMPT = (0, "<1><2>")


def measured(address: str, variant: Variant, rtt_ms: float) -> Sample:
    """One generation of 80 tokens."""
    with grpc.insecure_channel(address) as channel:
        return measure(pb_grpc.CoordinatorServiceStub(channel), variant, GREEDY, rtt_ms, PROMPT, 80)


@pytest.mark.more
def test_a_round_trip_to_the_draft_is_felt_where_rounds_wait_for_it(network: Network, tmp_path: Path) -> None:
    """Claim: services run on machines of their own; a delay set while they run is in every synchronous round, and not
    in plain decoding, which never calls the draft; the text is the same.

    Conclusive: three real processes and models that compute nothing, so a round's wait is the network. The client is a
    process of its own: gRPC connects in threads that may be older than this test, and so on another machine.
    """
    models = table_models(tmp_path)
    with running(*models, network=network, threads=1) as services, network.machines["coordinator"].inside():
        address = services.coordinator.address
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as client:
            network.set_delay("coordinator", "draft", 10.0)
            waiting = client.submit(measured, address, synchronous(2), 20.0).result()
            plain = client.submit(measured, address, OFF, 20.0).result()
            network.set_delay("coordinator", "draft", 0.0)
            near = client.submit(measured, address, synchronous(2), 0.0).result()
        waited_ms = [own.wait_ms * own.rounds / own.spec_steps for own in (waiting, near)]
        assert waited_ms[0] >= 19.0 and waited_ms[0] >= waited_ms[1] + 15.0
        assert plain.wait_ms == 0.0 and plain.draft_tokens == 0 and plain.tokens_per_s > waiting.tokens_per_s
        assert near.text_digest == waiting.text_digest == plain.text_digest
        assert cpu_seconds(services.target.process.pid) > 0.0
        assert set_priority(services.coordinator.process.pid, 1)


def test_cpu_time_of_an_ended_process_is_an_error() -> None:
    """Claim: the CPU time of an ended process is not reported as 0."""
    with pytest.raises(OSError):
        cpu_seconds(2**22 + 1)
