"""`specdec trace` as people run it, on traces of real services behind an HTTP server that answers as Jaeger does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.bench.otlp_receiver import Receiver
from tests.support.services import Outcome, Services, fixed
from tests.support.traces import trace_of


@pytest.fixture(scope="module")
def outcome(services: Services, receiver: Receiver) -> Outcome:
    """A generation whose trace has arrived."""
    asked = {"temperature": 0.7, "seed": 2, "ignore_eos": True, "speculative": fixed(3, draft_wait_ms=50)}
    generated = services.client.generate([1, 2, 3], max_tokens=60, **asked)
    trace_of(receiver, generated)
    return generated


@pytest.fixture(scope="module")
def jaeger(receiver: Receiver) -> Iterator[str]:
    """Where the traces can be read."""
    with receiver.serve_http() as address:
        yield address


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, 120 columns wide."""
    command = [sys.executable, "-m", "specdec.cli", "trace", *arguments]
    environment = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


def test_a_trace_is_shown_with_where_its_time_went(outcome: Outcome, jaeger: str):
    """Claim: by request id or trace id the command prints the tree with all services and hops, and the six kinds of
    time, whose shares are of one whole."""
    for name in (outcome.started.request_id, outcome.finished.trace_id.upper()):
        done = run(name, "--jaeger", jaeger)
        assert done.returncode == 0, done.stderr
        for span in ("Generate", "prefill", "round group, \\w+", "round", "verify", "queue", "forward", "draft"):
            assert re.search(rf"^\s+{span}\s", done.stdout, re.MULTILINE), span
        assert "60 tokens in" in done.stdout
        shares = {
            kind: float(share) for kind, share in re.findall(r"^ (\w+) +[\d.]+ +([\d.]+)%", done.stdout, re.MULTILINE)
        }
        assert list(shares) == ["draft", "network", "queue", "forward", "rule", "waiting"]
        assert sum(shares.values()) == pytest.approx(100.0, abs=0.5)


def test_an_export_can_be_read_back_and_is_what_the_upload_page_takes(outcome: Outcome, jaeger: str, tmp_path: Path):
    """Claim: --export writes one JSON object with resourceSpans and hexadecimal ids, nothing around it; --file shows
    the same from it, and from a raw answer too."""
    file = tmp_path / "trace.json"
    shown = run(outcome.finished.trace_id, "--jaeger", jaeger, "--export", str(file))
    exported = json.loads(file.read_text(encoding="utf-8"))
    assert list(exported) == ["resourceSpans"]
    spans = [span for own in exported["resourceSpans"] for scope in own["scopeSpans"] for span in scope["spans"]]
    assert {span["traceId"] for span in spans} == {outcome.finished.trace_id}
    assert all(re.fullmatch("[0-9a-f]{16}", span["spanId"]) for span in spans)
    assert run("--file", str(file)).stdout == shown.stdout
    file.write_text(json.dumps({"result": exported}) + "\n", encoding="utf-8")
    assert run("--file", str(file)).stdout == shown.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["0" * 32], "knows no such trace"),
        (["abc"], "32 hexadecimal digits"),
        ([], "a trace id or --file"),
        (["--file", "nowhere.json"], "cannot be read"),
    ],
)
def test_errors_are_reported_in_one_line(jaeger: str, arguments: list[str], sentence: str):
    """Claim: an unknown id, a malformed id and a missing file each end in one clear line."""
    done = run(*arguments, "--jaeger", jaeger)
    assert done.returncode != 0 and sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_no_jaeger_and_no_trace(tmp_path: Path):
    """Claim: a closed port and a file that is no trace are reported as such."""
    done = run("0" * 32, "--jaeger", "http://127.0.0.1:9")
    assert done.returncode == 1 and "no answer" in done.stderr
    file = tmp_path / "other.json"
    file.write_text('{"data": []}', encoding="utf-8")
    assert "this is no trace" in run("--file", str(file)).stderr
