"""`specdec trace` as people run it, on traces of real services behind an HTTP server that answers as Jaeger does."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.trace_view import FOLD_FROM
from tests.support.otlp_receiver import Receiver
from tests.support.services import Outcome, Services, fixed
from tests.support.traces import ReadTrace, trace_of


@pytest.fixture(scope="module")
def outcome(services: Services, receiver: Receiver) -> Outcome:
    """A generation whose trace has arrived."""
    asked = {"temperature": 0.7, "seed": 2, "ignore_eos": True, "speculative": fixed(3, draft_wait_ms=2000)}
    generated = services.client.generate([1, 2, 3], max_tokens=400, **asked)
    trace_of(receiver, generated)
    return generated


@pytest.fixture(scope="module")
def jaeger(receiver: Receiver) -> Iterator[str]:
    """Where the traces can be read."""
    with receiver.serve_http() as address:
        yield address


def run(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, on a terminal of this width."""
    command = [sys.executable, "-m", "specdec.cli", "trace", *arguments]
    environment = {**os.environ, "COLUMNS": str(columns)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


def test_a_trace_is_shown_with_where_its_time_went(outcome: Outcome, jaeger: str):
    """Claim: by request id or trace id the command prints the tree with all services and hops, and the six kinds of
    time, whose shares are of one whole; the largest is told in a sentence. Nothing is cut at 80 columns."""
    for name in (outcome.started.request_id, outcome.finished.trace_id.upper()):
        done = run(name, "--jaeger", jaeger)
        assert done.returncode == 0, done.stderr
        for span in ("Generate", "prefill", "round group, \\w+", "round", "verify", "queue", "forward", "draft"):
            assert re.search(rf"^\s*{span}\s", done.stdout, re.MULTILINE), span
        assert max(map(len, done.stdout.splitlines())) <= 80 and "…" not in done.stdout
        assert "400 tokens in" in done.stdout
        shares = {
            kind: float(share) for kind, share in re.findall(r"^(\w+) +[\d.]+ +([\d.]+)%", done.stdout, re.MULTILINE)
        }
        assert list(shares) == ["draft", "network", "queue", "forward", "heads", "rule", "waiting"]
        assert sum(shares.values()) == pytest.approx(100.0, abs=0.5)
        largest = max(shares, key=lambda kind: shares[kind])
        told = re.search(r"Largest part: (\w+), (\d+)%", done.stdout)
        assert told is not None and told[1] == largest and abs(int(told[2]) - shares[largest]) <= 0.6  # both rounded


def test_spans_of_one_kind_share_a_line(outcome: Outcome, jaeger: str, receiver: Receiver):
    """Claim: spans of one name below one line share it, with their number, the median and the 99th percentile of their
    times; --all shows each. Conclusive: the numbers are computed again from the spans."""
    trace = trace_of(receiver, outcome)
    steps = [span for service, span in trace.spans if (service, span.name) == ("specdec-target", "queue")]
    folded = run(outcome.finished.trace_id, "--jaeger", jaeger).stdout
    counts = [int(count) for count in re.findall(r"^ +queue ×(\d+) ", folded, re.MULTILINE)]
    alone = len(re.findall(r"^ +queue +target", folded, re.MULTILINE))
    assert counts and sum(counts) + alone == len(steps)
    shown = run(outcome.finished.trace_id, "--jaeger", jaeger, "--all").stdout
    assert "×" not in shown and len(re.findall(r"^ +queue +target", shown, re.MULTILINE)) == len(steps)
    assert len(folded.splitlines()) < len(shown.splitlines())
    lines = re.findall(r"^ +draft ×(\d+) +draft +[\d.]+ +([\d.]+) +([\d.]+)", folded, re.MULTILINE)
    expected = []
    group_names = Counter(group.name for group in trace.groups)
    by_line = defaultdict(list)  # phases of one name share a line too, if they are as many
    for step in draft_steps(trace):
        phase = trace.parent(step)
        line = phase.name if group_names[phase.name] >= FOLD_FROM else phase.span_id
        by_line[line].append((step.end_time_unix_nano - step.start_time_unix_nano) / 1e6)
    for times_ms in map(sorted, by_line.values()):
        if len(times_ms) >= FOLD_FROM:
            p99 = times_ms[math.ceil(0.99 * len(times_ms)) - 1]
            expected.append((str(len(times_ms)), f"{statistics.median(times_ms):.2f}", f"{p99:.2f}"))
    assert sorted(lines) == sorted(expected) != []


def draft_steps(trace: ReadTrace) -> list[Any]:
    """The steps that the draft recorded."""
    return [span for service, span in trace.spans if (service, span.name) == ("specdec-draft", "draft")]


def test_the_facts_are_json_too(outcome: Outcome, jaeger: str):
    """Claim: --json prints the numbers that the terminal shows. Conclusive: compared with the response's own."""
    found = json.loads(run(outcome.finished.trace_id, "--jaeger", jaeger, "--json").stdout)
    statistics_ = outcome.finished.statistics
    assert found["trace_id"] == outcome.finished.trace_id
    assert (found["output_tokens"], found["rounds"]) == (400, statistics_.rounds)
    assert found["acceptance"] == pytest.approx(statistics_.draft_acceptance_rate, abs=1e-3)
    assert sum(part["ms"] for part in found["parts"]) == pytest.approx(found["total_ms"], rel=1e-3)
    assert found["largest"] == max(found["parts"], key=lambda part: part["ms"])["name"]


def test_generations_are_found_without_an_id(services: Services, receiver: Receiver, outcome: Outcome, jaeger: str):
    """Claim: --last shows the newest generation, --slowest lists the longest first, --errors those that failed and no
    other, two ids are shown side by side. Conclusive: three generations whose order and failure are known."""
    long = services.client.generate([1, 2], max_tokens=300, ignore_eos=True, speculative=fixed(3))
    trace_of(receiver, long)
    newest = services.client.generate([1, 2], max_tokens=5, ignore_eos=True, speculative=fixed(3))
    trace_of(receiver, newest)
    last = json.loads(run("--last", "--jaeger", jaeger, "--json").stdout)
    assert last["trace_id"] == newest.finished.trace_id
    slowest = json.loads(run("--slowest", "2", "--jaeger", jaeger, "--json").stdout)
    times_ms = [one["total_ms"] for one in slowest]
    assert len(slowest) == 2 and times_ms == sorted(times_ms, reverse=True)
    assert long.finished.trace_id in [one["trace_id"] for one in slowest]
    assert long.finished.trace_id in run("--slowest", "2", "--jaeger", jaeger).stdout.replace("\n", "")
    beside = run(newest.finished.trace_id, long.finished.trace_id, "--jaeger", jaeger).stdout
    assert re.search(r"^tokens +5 +300 +60.00 *$", beside, re.MULTILINE)
    for shown in (run(long.finished.trace_id, "--jaeger", jaeger).stdout, beside):
        cut = [line for line in shown.splitlines() if "…" in line and "ratio" not in line]  # ids are short there
        assert max(map(len, shown.splitlines())) <= 80 and not cut
    none = run("--errors", "--jaeger", jaeger)
    assert none.returncode == 1 and "no failure was found" in none.stderr


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
        ([], "give a trace id, --file, --last"),
        (["--last", "--errors"], "one of them"),
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
