"""Network time without a common clock: other machines' clocks are 40 ms ahead, over emulated links of 10 ms one way.

Two kinds of skew, because libfaketime disturbs what waits by a clock it fakes: the wall clock alone, under which
everything works and all services send spans; and every clock a process can read, under which the replicas serve but
their exporters do not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.launch.children import Child, arguments_of, start, wait_all_ready
from tests.support.network.machines import Network, emulated
from tests.support.otlp_receiver import Receiver
from tests.support.services import Client, fixed
from tests.support.traces import CLIENT, SOON, ReadTrace, attributes, environment, trace_of

ONE_WAY_MS, SKEW_MS, TOLERANCE_MS = 10.0, 40.0, 1.0
GENERATION_COUNT = 4
LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
FAKED = {"LD_PRELOAD": str(LIBRARIES[0]) if LIBRARIES else "", "FAKETIME": f"+{SKEW_MS / 1000}"}
WALL_CLOCK = {**FAKED, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
ALL_CLOCKS = FAKED
NO_SKEW: dict[str, str] = {}

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(not LIBRARIES, reason="libfaketime is not installed (Debian: faketime)"),
]


@pytest.fixture(scope="module")
def link() -> Iterator[Network]:
    """Three machines; the links to the draft and to the target have the delay."""
    with emulated({name: () for name in ("coordinator", "target", "draft")}, namespaces_allowed=False) as network:
        network.set_delay("coordinator", "target", ONE_WAY_MS)
        network.set_delay("coordinator", "draft", ONE_WAY_MS)
        yield network


def traces_of(models: tuple[Path, Path], link: Network, skew: Mapping[str, str]) -> list[ReadTrace]:
    """Traces of generations by services whose replicas live under a skew."""
    common: dict[str, Any] = {"port": 0, "log_level": "error", "drain_grace_s": 0.5}
    with Receiver() as receiver, environment(**SOON):
        traced_by = {**common, "otlp_traces_endpoint": receiver.endpoint}
        replica = {**(common if skew is ALL_CLOCKS else traced_by), "threads": 1}
        target = Child("target", arguments_of(TargetSettings(model=str(models[0]), **replica)), skew)
        draft = Child("draft", arguments_of(DraftSettings(model=str(models[1]), **replica)), skew)
        with target, draft:
            wait_all_ready([target, draft])
            reached = {
                one.command: link.address_from("coordinator", one.command, one.address) for one in (target, draft)
            }
            settings = CoordinatorSettings(tokenizer=str(models[0]), speculation_policy="fixed", **reached, **traced_by)
            with start("coordinator", settings) as coordinator:
                client = Client(coordinator.wait_ready())
                asked = {"temperature": 0.7, "ignore_eos": True, "speculative": fixed(3, draft_wait_ms=60)}
                outcomes = [
                    client.generate([1, 2], max_tokens=60, seed=seed, **asked) for seed in range(GENERATION_COUNT)
                ]
                client.close()
                return [trace_of(receiver, outcome) for outcome in outcomes]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(WALL_CLOCK, id="wall clock"),
        pytest.param(ALL_CLOCKS, id="all clocks", marks=pytest.mark.slow),
    ],
)
def traces(request: pytest.FixtureRequest, table_models, link: Network) -> list[ReadTrace]:
    """Traces under either kind of skew."""
    return traces_of(table_models, link, request.param)


@pytest.fixture(scope="module")
def plain_traces(table_models, link: Network) -> list[ReadTrace]:
    """Traces of machines whose clocks agree."""
    return traces_of(table_models, link, NO_SKEW)


def values_of(traces: list[ReadTrace], name: str, attribute: str) -> list[float]:
    """Values of all hops of a kind; none where the draft records no span."""
    verifications = [span for trace in traces for span in trace.named("verify", CLIENT)]
    groups = [group for trace in traces for group in (*trace.named("prefill"), *trace.groups)]
    arrivals = [event for group in groups for event in group.events if event.name == "draft tokens arrived"]
    assert verifications, "no verification was recorded"
    values = [attributes(hop)[attribute] for hop in (verifications if name == "verify" else arrivals)]
    if values:
        print(f"{name} {attribute}: {len(values)} hops, least {min(values):.2f} ms, median {median(values):.2f} ms")
    return values


@pytest.mark.parametrize("name", ["verify", "draft"])
def test_network_time_is_right_although_the_clocks_are_not(
    traces: list[ReadTrace], plain_traces: list[ReadTrace], name: str
):
    """Claim: network time from four timestamps of two clocks equals that of clocks that agree, within 1 ms: the 20 ms
    of the link plus sockets and emulation. Conclusive: minima are compared, since a busy machine delivers late and
    never early; a clock's 40 ms would show there too."""
    values, plain = (values_of(each, name, "specdec.network_ms") for each in (traces, plain_traces))
    assert min(plain) >= 2 * ONE_WAY_MS
    assert not values or abs(min(values) - min(plain)) < TOLERANCE_MS


@pytest.mark.parametrize("name", ["verify", "draft"])
def test_the_clocks_are_found_apart(traces: list[ReadTrace], name: str):
    """Claim: the estimated offset is the 40 ms that were set, on the least disturbed hop."""
    values = values_of(traces, name, "specdec.clock_offset_ms")
    assert not values or min(abs(value - SKEW_MS) for value in values) < TOLERANCE_MS


def test_the_spans_themselves_are_skewed(traces: list[ReadTrace]):
    """Claim: the skew was real: the target's spans, where it sent any, begin 50 ms after the message left by their
    clocks, of which the link explains 10."""
    shown = [
        (server.start_time_unix_nano - client.start_time_unix_nano) / 1e6
        for trace in traces
        for client in trace.named("verify", CLIENT)
        for server in trace.children[client.span_id]
    ]
    assert not shown or median(shown) == pytest.approx(SKEW_MS + ONE_WAY_MS, abs=3 * TOLERANCE_MS)
