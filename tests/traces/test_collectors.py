"""Absent, slow or silent collectors: requests are unaffected, and services stop in time."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from specdec.config import CoordinatorSettings
from specdec.errors import ConfigError
from specdec.launch.children import python_command
from specdec.telemetry.open_tracing import open_tracing
from specdec.telemetry.tracing import CLOSE_TIMEOUT_S
from tests.support.services import Outcome, Services, fixed, running
from tests.support.traces import traced

DRAIN_GRACE_S = 1.0
START_AND_STOP_S = 6.0  # of a process on a busy machine, beside the waits of the test
REQUEST_COUNT = 6


@contextlib.contextmanager
def refusing() -> Iterator[str]:
    """An endpoint where connections are refused."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """An endpoint that accepts connections, reads nothing and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        for one in taken:
            one.close()


def ask(services: Services, index: int) -> Outcome:
    speculative = fixed(3, draft_window=6, draft_wait_ms=50)
    return services.client.generate([1, 2, 3], max_tokens=60, temperature=0.7, seed=index, speculative=speculative)


@pytest.fixture(scope="module")
def reference(table_models) -> list[tuple]:
    """The results of the requests without tracing."""
    with running(*table_models, threads=1) as services:
        return [ask(services, index).comparable for index in range(REQUEST_COUNT)]


@pytest.mark.parametrize(
    "collector",
    [
        pytest.param(refusing, id="absent", marks=pytest.mark.slow),
        pytest.param(black_hole, id="black hole", marks=pytest.mark.slow),
    ],
)
def test_a_collector_that_is_away_changes_nothing(table_models, reference: list[tuple], collector):
    """Claim: with a collector that refuses or swallows everything, requests give the same texts to the last token, and
    stopping services end within their grace and the bound for the last spans, with exit code 0."""
    with collector() as endpoint, traced(table_models, endpoint) as services:
        outcomes = [ask(services, index) for index in range(REQUEST_COUNT)]
        assert [outcome.comparable for outcome in outcomes] == reference
        time.sleep(0.5)  # an export is under way now, and stuck
        for child in (services.coordinator, services.draft, services.target):
            assert child is not None
            began_s = time.monotonic()
            assert child.stop(grace_s=30) == 0
            assert time.monotonic() - began_s < DRAIN_GRACE_S + CLOSE_TIMEOUT_S + START_AND_STOP_S


def test_recording_never_blocks():
    """Claim: with a silent collector and a full queue `record` still returns at once and keeps only the newest."""
    from specdec.telemetry.spans import Span

    with black_hole() as endpoint:
        tracing = open_tracing("test", endpoint, {})
        span = Span("round", b"\x01" * 16, b"\x02" * 8, b"", 1.0, 2.0)
        began_s = time.monotonic()
        for _ in range(400):
            tracing.record([span] * 100)  # more than twice the queue's capacity
        recorded_s = time.monotonic() - began_s
        tracing.close()
        assert recorded_s < 10.0, "40,000 spans at 25 µs each take one second; a blocked one would take ten"
        assert time.monotonic() - began_s < recorded_s + CLOSE_TIMEOUT_S + 1.0
        tracing.record([span])  # after the end: nowhere


def test_settings_of_the_environment():
    """Claim: without an endpoint, or with the SDK disabled, tracing is off and the SDK is not used; a protocol that
    is not supported is refused by name; settings refuse values that are no endpoint."""
    assert not open_tracing("test", None, {}).is_on
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}
    assert not open_tracing("test", None, {**endpoint, "OTEL_SDK_DISABLED": "true"}).is_on
    assert not open_tracing("test", None, {**endpoint, "OTEL_TRACES_EXPORTER": "none"}).is_on
    with pytest.raises(ConfigError, match="http/protobuf"):
        open_tracing("test", None, {**endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
    for wrong in ("127.0.0.1:4317", "http://", "http://127.0.0.1:4318/v1/traces", "ftp://127.0.0.1"):
        with pytest.raises(ValueError, match="http://HOST:PORT"):
            CoordinatorSettings(target="127.0.0.1:1", tokenizer="x", otlp_traces_endpoint=wrong)


# One value that does not parse for each variable of a number or a name; the SDK ends a process for most of them.
UNUSABLE = {
    **dict.fromkeys(("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT"), "10s"),
    **dict.fromkeys(("OTEL_EXPORTER_OTLP_COMPRESSION", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION"), "zip"),
    "OTEL_BSP_MAX_QUEUE_SIZE": "many",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "0",
    "OTEL_BSP_SCHEDULE_DELAY": "9" * 20,
    "OTEL_BSP_EXPORT_TIMEOUT": "-1",
    "OTEL_TRACES_SAMPLER_ARG": "half",
    "OTEL_ATTRIBUTE_COUNT_LIMIT": "1.5",
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "-1",
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT": "many",
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT": "many",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "many",
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": "many",
    "OTEL_SPAN_EVENT_COUNT_LIMIT": "many",
    "OTEL_SPAN_LINK_COUNT_LIMIT": "many",
}
OPEN = """
import os
from specdec.telemetry.open_tracing import open_tracing
from specdec.telemetry.tracing import Tracing
tracing = open_tracing("test")
tracing.close()
print("tracing is on" if tracing.is_on else "tracing is off")
"""


@pytest.mark.parametrize(
    ("variables", "warnings", "is_on"),
    [
        (UNUSABLE, sorted(UNUSABLE), True),
        (
            {"OTEL_EXPORTER_OTLP_TIMEOUT": "5", "OTEL_EXPORTER_OTLP_COMPRESSION": "none", "OTEL_TRACES_SAMPLER": "x"},
            [],
            True,
        ),
        (
            {"OTEL_BSP_MAX_QUEUE_SIZE": "100", "OTEL_SPAN_EVENT_COUNT_LIMIT": "", "OTEL_RESOURCE_ATTRIBUTES": "x"},
            [],
            True,
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[::1"}, [], False),
    ],
    ids=["unusable", "usable", "small queue", "no endpoint"],
)
def test_variables_that_do_not_parse_are_ignored(variables: dict[str, str], warnings: list[str], is_on: bool) -> None:
    """Claim: a variable that does not parse costs its own effect and one warning that names it, as the specification
    of OpenTelemetry says; an environment that the SDK refuses altogether costs the spans. No process ends.

    Source: `OTEL_EXPORTER_OTLP_TIMEOUT=10s` ended a service with a traceback. Conclusive: a process of its own, since
    the SDK reads some variables when it is imported; a value that does parse causes no warning.
    """
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    command, environment = python_command("-c", OPEN), os.environ | endpoint | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"variable is ignored.*?variable=\W*(?:\x1b\[\d+m)*(OTEL_\w+)", done.stdout)) == warnings
    assert done.stdout.splitlines()[-1] == ("tracing is on" if is_on else "tracing is off")
    assert ("traces are off" in done.stdout) != is_on


def test_a_service_names_itself_unless_the_environment_does(monkeypatch: pytest.MonkeyPatch):
    """Claim: the resource is the service with its host and process; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say
    otherwise, or more."""
    from specdec.telemetry.sdk_spans import own_resource

    ours = {"service.name": "specdec-target", "host.name": "node-1"}
    assert own_resource(ours).attributes["service.name"] == "specdec-target"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=pod-7,deployment.environment=test")
    said = own_resource(ours).attributes
    assert (said["service.name"], said["host.name"], said["deployment.environment"]) == ("mine", "pod-7", "test")
