"""Real services on emulated machines: reached over the emulated network, and slowed down by it."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from bench.harness import running
from bench.network.machines import Network
from bench.pipeline.samples import measure
from bench.pipeline.variants import OFF, synchronous
from bench.processes import cpu_seconds, set_priority
from bench.rounds import table_models
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc

GREEDY = "GREEDY, temperature 0"
PROMPT = (0, "<1><2>")


def test_a_round_trip_to_the_draft_is_felt_where_rounds_wait_for_it(network: Network, tmp_path: Path) -> None:
    """Claim: services run on machines of their own; a delay set while they run is in every synchronous round, and not
    in plain decoding, which never talks to the draft; the text is the same.

    Conclusive: three real processes and models that compute nothing, so what a round waits is the network.
    """
    models = table_models(tmp_path)
    with running(*models, network=network, threads=1) as services, network.machines["coordinator"].inside():
        with grpc.insecure_channel(services.coordinator.address) as channel:
            stub = pb_grpc.CoordinatorServiceStub(channel)
            network.set_delay("coordinator", "draft", 10.0)
            waiting = measure(stub, synchronous(2), GREEDY, 20.0, PROMPT, 80)
            plain = measure(stub, OFF, GREEDY, 20.0, PROMPT, 80)
            network.set_delay("coordinator", "draft", 0.0)
            near = measure(stub, synchronous(2), GREEDY, 0.0, PROMPT, 80)
        waited_ms = [own.wait_ms * own.rounds / own.spec_steps for own in (waiting, near)]
        assert waited_ms[0] >= 19.0 and waited_ms[0] >= waited_ms[1] + 15.0
        assert plain.wait_ms == 0.0 and plain.draft_tokens == 0 and plain.tokens_per_s > waiting.tokens_per_s
        assert near.text_digest == waiting.text_digest == plain.text_digest
        assert cpu_seconds(services.target.process.pid) > 0.0
        assert set_priority(services.coordinator.process.pid, 1)


def test_cpu_time_of_nobody_is_an_error() -> None:
    """Claim: the CPU time of a process that is gone is not reported as none."""
    with pytest.raises(OSError):
        cpu_seconds(2**22 + 1)
