"""The cost of tracing and metrics without wall time: CPU of a sampled round and of the metrics, and spans of a
generation.

A round's cost is timed alone, in this process, with spans that are sent for real. Spans are counted on table models,
which compute nothing, so that there are as many messages as there can be.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from bench.rounds import table_models
from specdec.client.request import make_request
from specdec.coordinator.statistics import CoordinatorMetrics, RequestStatistics
from specdec.coordinator.tracing import RequestTrace
from specdec.policy.fixed_policy import FixedPolicy
from specdec.protocol.events import Concluded, Event, Ready, TargetFound
from specdec.protocol.items import Trace, VerificationResult
from specdec.protocol.plan import OFF_PLAN
from specdec.protocol.records import RoundRecord, RoundTimes, RoundTokens, TargetStep, TreeUse
from specdec.protocol.report import Finished, Started, Statistics
from specdec.protocol.request import GenerationRequest
from specdec.protocol.session import Session
from specdec.protocol.types import FinishReason, ResolvedSamplingParams, Rule, SamplerOutput, TokenKind, Verdict
from specdec.replica.metrics import ReplicaMetrics
from specdec.rpc.stamps import Stamps
from specdec.telemetry.open_tracing import open_tracing
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support import harness
from tests.support.otlp_receiver import Receiver
from tests.support.processes import module_command

TOLD_ROUND_COUNT, TRY_COUNT = 8_000, 5
ROUND_COUNTS = (10, 100, 2000)
VOCABULARY_SIZE, POSITIONS = 11, 8192
SETTLE_S = 2.0


@contextlib.contextmanager
def variables(added: dict[str, str]) -> Iterator[None]:
    """Processes begun meanwhile have these in their environment."""
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """A collector in a process of its own; yields its endpoint."""
    command = module_command("tests.support.otlp_receiver")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def traced_us() -> float:
    """CPU microseconds that a sampled round costs the coordinator, the sending of its spans included: the least of some
    loops with a trace, less the least without."""
    context = Trace(bytes(15) + b"\1", bytes(7) + b"\1", sampled=True)
    plain_s = min(rounds_s(RequestStatistics(CoordinatorMetrics(), context, "")) for _ in range(TRY_COUNT))
    with collector() as endpoint:
        traced_s = min(rounds_s_with_sending(endpoint, context) for _ in range(TRY_COUNT))
    return 1e6 * (traced_s - plain_s) / TOLD_ROUND_COUNT


def rounds_s_with_sending(endpoint: str, context: Trace) -> float:
    """CPU seconds of this process for the rounds, and until their spans are sent."""
    tracing = open_tracing("bench", endpoint, {})
    before_s = time.process_time()
    rounds_s(RequestTrace(CoordinatorMetrics(), context, "", tracing))
    tracing.close()
    return time.process_time() - before_s


def rounds_s(trace: RequestStatistics) -> float:
    """CPU seconds of a session's rounds of plain decoding, with their reports to its trace."""
    params = ResolvedSamplingParams(rule=Rule.GREEDY, seed=0, prompt_length=2, temperature=0.0)
    session = Session(1, params, 2 + TOLD_ROUND_COUNT, VOCABULARY_SIZE, FixedPolicy(3), [1, 2])
    target = SimpleNamespace(
        link=SimpleNamespace(stamps=Stamps()), usable=lambda: SimpleNamespace(trace_service="", model_name="")
    )
    choice: Any = SimpleNamespace(target=target, draft=None, policy=session.policy)
    trace.admitted(GenerationRequest(token_ids=(1, 2)), Started("", 0, Rule.GREEDY, 2, TOLD_ROUND_COUNT), choice)
    began_s, event = time.process_time(), TargetFound()
    step(trace, session, event)
    for index in range(TOLD_ROUND_COUNT - 1):
        now_s = time.monotonic()
        answer = VerificationResult(1, 1, index, SamplerOutput((3,)), 10, 100, 10, server_us=150)
        times = RoundTimes(now_s, now_s, sent_s=now_s)
        step(trace, session, Concluded(Verdict((), 3, TokenKind.BONUS), answer, (3,), False, times))
    return time.process_time() - began_s


def step(trace: RequestStatistics, session: Session, event: Event) -> None:
    """A step of a session as a generation takes it, with its reports, but nothing is sent."""
    ready = session.step(event)
    trace.on_step(event, ready, time.monotonic())
    for item in ready.to_target:
        trace.in_context(item)


def counting_us() -> dict[str, float]:
    """CPU microseconds that metrics add to a round and a request of the coordinator and to a step of a replica: the
    least of some loops."""
    finished = Finished(FinishReason.LENGTH, "", None, 2, 3, Statistics(), "")
    tokens = RoundTokens(offered_count=3, accepted_count=2, kept_count=3, next_kind=TokenKind.RECOVERED)
    times, step = RoundTimes(end_s=0.02, round_trip_s=0.02), TargetStep(forward_s=0.01)
    record = RoundRecord(1, OFF_PLAN, tokens, TreeUse(was_looked_up=True), times, step)
    context = Trace(bytes(15) + b"\1", bytes(7) + b"\1", sampled=False)
    metrics, replica = CoordinatorMetrics(), ReplicaMetrics()
    request, started = GenerationRequest(token_ids=(1, 2)), Started("", 0, Rule.GREEDY, 2, 3)
    nothing: Any = None  # an argument that only a recorded trace uses
    ready, concluded = Ready(record=record), Concluded(Verdict((), 3, TokenKind.BONUS), nothing, (3,))
    statistics = Statistics()
    running = RequestStatistics(metrics, context, "")

    def one_request() -> None:
        own = RequestStatistics(metrics, context, "")
        own.admitted(request, started, nothing)
        own.finished(finished)
        own.closed()

    counted: dict[str, Callable[[], object]] = {
        "round": lambda: running.on_step(concluded, ready, 0.0),
        "statistics": lambda: statistics.on_round(record),
        "request": one_request,
        "step": lambda: replica.stepped(8, 4, 0.02),
    }
    took_us = {what: min(loop_us(count) for _ in range(TRY_COUNT)) for what, count in counted.items()}
    took_us["round"] -= took_us.pop("statistics")  # which are counted for the request's own end
    return took_us


def loop_us(act: Callable[[], object]) -> float:
    """CPU microseconds of one call, among many."""
    began_s = time.process_time()
    for _ in range(TOLD_ROUND_COUNT):
        act()
    return 1e6 * (time.process_time() - began_s) / TOLD_ROUND_COUNT


def count_spans(console: Console) -> None:
    """Prints the spans of generations of several lengths in rounds, by service and name."""
    table = Table(title="Spans of one generation", box=None, title_justify="left")
    for name in ("rounds", "spans", "of which"):
        table.add_column(name, justify="left" if name == "of which" else "right")
    with tempfile.TemporaryDirectory() as folder, Receiver() as receiver:
        paths = table_models(Path(folder), VOCABULARY_SIZE, POSITIONS)
        told: dict[str, Any] = {"otlp_traces_endpoint": receiver.endpoint}
        with variables({"OTEL_BSP_SCHEDULE_DELAY": "100"}):
            stack = harness.running(*paths, {**told, "speculation_policy": "fixed"}, threads=1, **told)
            with stack as services, grpc.insecure_channel(services.coordinator.address) as channel:
                for round_count in ROUND_COUNTS:
                    table.add_row(*spans_of(pb_grpc.CoordinatorServiceStub(channel), receiver, round_count))
    console.print(table)


def spans_of(stub: pb_grpc.CoordinatorServiceStub, receiver: Receiver, round_count: int) -> tuple[str, str, str]:
    """Runs one generation, cancelled after `round_count` rounds, and counts its spans."""
    request = make_request([1, 2, 3], max_tokens=POSITIONS - 3, ignore_eos=True, seed=1)
    call = stub.Generate(request, timeout=600)
    trace_id, count = b"", 0
    for response in call:
        if response.HasField("started"):
            trace_id = bytes.fromhex(response.started.request_id)
        count += response.HasField("delta")
        if count >= round_count:
            break
    call.cancel()
    time.sleep(SETTLE_S)
    spans = list(receiver.spans(trace_id))
    by_name = Counter(f"{service.removeprefix('specdec-')} {span.name}" for service, span in spans)
    parts = ", ".join(f"{number} {name}" for name, number in by_name.most_common())
    return str(round_count), str(len(spans)), parts
