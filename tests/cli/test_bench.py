"""`specdec bench` as a user runs it, against real services of the embedded pair; no time is judged."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import pytest

from specdec.chat.template import ChatTemplate
from specdec.cli.bench import BenchSettings
from specdec.cli.bench_prompts import read_prompts
from specdec.cli.bench_view import SECTIONS, sentence_of
from specdec.cli.main import COMMANDS, KNOWN_FIELDS, run_command
from specdec.cli.options import make_parser, read_settings
from specdec.client.load import arrivals
from specdec.errors import ConfigError, SpecdecError
from specdec.folders import CHAT_DRAFT, heldout_prompts
from tests.support.harness import running

TURNS, TOKENS, LOADS = 6, 16, (1, 3)
COMMAND = [sys.executable, "-m", "specdec.cli", "bench"]
ENVIRONMENT = {**os.environ, "COLUMNS": "120"}


def bench(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=300, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The coordinator of the embedded pair."""
    with running(threads=1) as services:
        yield services.coordinator.address


class Outcome:
    """A run on two loads, its JSON, and the tables that it printed: values by load, column and line."""

    def __init__(self, address: str, folder: Path) -> None:
        file = folder / "bench.json"
        self.picture = folder / "bench.png" if find_spec("matplotlib") else None
        told = ("--address", address, "--concurrency", *map(str, LOADS), "--turns", str(TURNS), "--max-tokens", TOKENS)
        told += ("--ignore-eos", "--temperature", "0.7", "--seed", "5", "--json", file)
        told += ("--policy", "fixed", "--num-speculative-tokens", "3", "--draft-wait-ms", "2000")  # on however slow
        told += ("--picture", self.picture) if self.picture else ()
        self.done = bench(*map(str, told))
        assert self.done.returncode == 0 and self.done.stderr == ""
        self.report: dict[str, Any] = json.loads(file.read_text())
        self.tables = [tables_of(part) for part in self.done.stdout.split(" at once")[1:]][: len(LOADS)]


def tables_of(printed: str) -> dict[str, list[str]]:
    """The cells of a table's lines, by the first."""
    lines = [line.strip()[1:-1] for line in printed.splitlines() if "│" in line]
    rows = [[cell.strip() for cell in line.split("│")] for line in lines]
    return {row[0]: row[1:] for row in rows if len(row) > 1}


@pytest.fixture(scope="module")
def outcome(address: str, tmp_path_factory) -> Outcome:
    return Outcome(address, tmp_path_factory.mktemp("bench"))


def expected(blocks: list[dict]) -> dict[str, float]:
    """The metrics of blocks of one way, from the times in the JSON, by numpy."""
    requests = [request for block in blocks for request in block["requests"]]
    seconds = sum(max(request["ended_s"] for request in block["requests"]) for block in blocks)
    outputs = sum(count for request in requests for _, count in request["deltas"])
    moments = [[moment for moment, _ in request["deltas"]] for request in requests]
    lengths = [sum(count for _, count in request["deltas"]) for request in requests]
    times = {
        "ttft": [own[0] - request["sent_s"] for own, request in zip(moments, requests)],
        "tpot": [(one["ended_s"] - own[0]) / (n - 1) for own, one, n in zip(moments, requests, lengths)],
        "itl": [gap for own in moments for gap in numpy.diff(own)],
        "e2el": [request["ended_s"] - request["sent_s"] for request in requests],
    }
    found = {"completed": len(requests), "failed": 0, "duration": seconds, "total_output_tokens": outputs}
    found["total_input_tokens"] = inputs = sum(request["input_tokens"] for request in requests)
    found["request_throughput"] = len(requests) / seconds
    found["output_throughput"], found["total_token_throughput"] = outputs / seconds, (inputs + outputs) / seconds
    for name, values in times.items():
        values_ms = 1000 * numpy.array(values)
        found |= {f"mean_{name}_ms": values_ms.mean(), f"median_{name}_ms": numpy.median(values_ms)}
        found[f"p99_{name}_ms"] = numpy.percentile(values_ms, 99)
    return found


@pytest.mark.lengthy
def test_the_table_follows_from_the_times_of_the_requests(outcome: Outcome) -> None:
    """Claim: every value that is printed is the one in the JSON, and that follows from the times of the requests beside
    it. Conclusive: all are computed again from these times, by numpy, and every cell of every table is read."""
    for load, cell, table in zip(LOADS, outcome.report["cells"], outcome.tables, strict=True):
        assert cell["max_concurrency"] == load
        for column, way in enumerate(("on", "off")):
            told = cell["ways"][way]
            blocks = [block for block in cell["blocks"] if block["way"] == way]
            for name, value in expected(blocks).items():
                assert told[name] == pytest.approx(value, rel=1e-3, abs=0.01), (load, way, name)
            for name, key, form in (line for section in SECTIONS for line in section):
                shown = format(told[key], form).removesuffix("%") if key in told else ""
                assert table[name][column] == shown, (load, way, name)
        assert cell["ways"]["on"]["completed"] == TURNS * load == cell["ways"]["off"]["completed"]
        assert cell["ways"]["on"]["total_output_tokens"] == TURNS * load * TOKENS
        assert 0 < cell["ways"]["on"]["spec_decode_acceptance_rate"] < 1
        assert "spec_decode_acceptance_rate" not in cell["ways"]["off"]
    assert outcome.picture is None or outcome.picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.lengthy
def test_on_and_off_take_turns(outcome: Outcome) -> None:
    """Claim: blocks with and without speculation alternate, first one way then the other, with the same prompts, and
    each request's text is the same; the ratio is the median over turns, and its interval holds it. Conclusive: order,
    numbers of the requests and ratios are those of the blocks in the JSON."""
    for load, cell in zip(LOADS, outcome.report["cells"], strict=True):
        blocks = cell["blocks"]
        order = [(block["turn"], block["way"]) for block in blocks]
        assert order == [(turn, way) for turn in range(1, TURNS + 1) for way in ("on", "off")[:: 1 if turn % 2 else -1]]
        numbers = [sorted(request["number"] for request in block["requests"]) for block in blocks]
        assert numbers[::2] == numbers[1::2] == [list(range(load * turn, load * turn + load)) for turn in range(TURNS)]
        rates: dict[str, dict[int, float]] = {"on": {}, "off": {}}
        for block in blocks:
            rates[block["way"]][block["turn"]] = expected([block])["output_throughput"]
        ratios = [rates["on"][turn] / rates["off"][turn] for turn in rates["on"]]
        told = cell["ratios"]["output_throughput"]
        assert told["median"] == pytest.approx(numpy.median(ratios), rel=1e-3) and told["pair_count"] == TURNS
        assert (told["low"], told["high"]) == pytest.approx((min(ratios), max(ratios)), rel=1e-3)
        assert cell["same_texts"] == [TURNS * load] * 2
    assert outcome.done.stdout.rstrip().endswith(outcome.report["sentence"])
    assert (
        outcome.report["sentence"].startswith("Speculation ")
        and "95 % interval of 6 turns" in outcome.report["sentence"]
    )


@pytest.mark.lengthy
def test_a_rate_is_kept_and_one_way_is_measured_alone(address: str, tmp_path: Path) -> None:
    """Claim: with --rate requests are sent when a Poisson process of --seed has them arrive, never before, however many
    are under way, and all of them; with --only off nothing speculates, and no ratio is told. Conclusive: the moments in
    the JSON are compared with the process; that the last request was sent before the first ended shows that none waited
    for another."""
    file = tmp_path / "bench.json"
    told = ("--rate", "200", "--num-prompts", "12", "--only", "off", "--seed", "3", "--max-tokens", "200")
    done = bench("--address", address, *told, "--ignore-eos", "--json", str(file))
    assert done.returncode == 0 and done.stderr == ""
    report = json.loads(file.read_text())
    (cell,) = report["cells"]
    (block,) = cell["blocks"]
    sent_s = [own["sent_s"] for own in sorted(block["requests"], key=lambda own: own["number"])]
    due_s = arrivals(12, 200.0, 3 + 1)
    assert len(sent_s) == 12 and all(sent >= due - 1e-3 for sent, due in zip(sent_s, due_s, strict=True))
    assert max(sent_s) < min(own["ended_s"] for own in block["requests"])
    assert (cell["max_concurrency"], cell["request_rate"]) == (None, 200.0)
    assert list(cell["ways"]) == ["off"] and cell["ratios"] == {} and report["sentence"] == ""
    assert "accept" not in done.stdout and "200 requests a second" in done.stdout


@pytest.mark.lengthy
def test_a_failed_request_is_counted_and_told(address: str, tmp_path: Path) -> None:
    """Claim: a request that the server refuses does not end the run: it is counted, its reason is told once, and its
    turn is in no ratio. The prompt is longer than the model takes."""
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "bench.json"
    texts = ["def f():", "import os", "word " * 5000]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    told = ("--prompts", str(prompts), "--num-prompts", "3", "--turns", "3", "--max-tokens", "4")
    done = bench("--address", address, *told, "--json", str(file))
    assert (
        done.returncode == 0
        and done.stderr.count("\n") == 1
        and "2 of 6 requests failed, the first one: " in done.stderr
    )
    (cell,) = json.loads(file.read_text())["cells"]
    for own in cell["ways"].values():
        assert (own["completed"], own["failed"]) == (2, 1)
    assert cell["ratios"]["output_throughput"]["pair_count"] == 2
    assert tables_of(done.stdout)["Failed requests"] == ["1", "1", ""]


@pytest.mark.lengthy
def test_an_interruption_prints_what_was_measured(address: str, tmp_path: Path) -> None:
    """Claim: on a terminal there is a bar with turns and the time left; after Ctrl-C the table of what was measured by
    then and the JSON of it come, and exit code 130. Conclusive: the signal is sent when the bar shows the third turn,
    so two turns are whole; the run would take a thousand."""
    file = tmp_path / "bench.json"
    told = ("--address", address, "--turns", "1000", "--max-tokens", "8", "--ignore-eos", "--json", str(file))
    ours, its = os.openpty()
    process = subprocess.Popen([*COMMAND, *told], stdout=subprocess.PIPE, stderr=its, text=True, env=ENVIRONMENT)
    os.close(its)
    shown = b""
    while b"turn 3" not in shown:
        shown += os.read(ours, 1 << 16)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 130, printed
    assert b"/2002" in shown and b"left" in shown
    (cell,) = json.loads(file.read_text())["cells"]
    completed = int(tables_of(printed)["Successful requests"][0])
    assert "Interrupted" in printed and 2 <= completed < 1000 and cell["ways"]["on"]["completed"] == completed


@pytest.mark.parametrize(
    "arguments, code, expected",
    [
        (["--concurrency", "1", "0"], 2, "--concurrency is '0'; it must be greater than or equal to 1"),
        (["--concurrency", "many"], 2, "--concurrency is 'many'; it must be a valid integer"),
        (["--rate", "0"], 2, "--rate is '0'; it must be greater than 0"),
        (["--rate", "nan"], 2, "--rate is 'nan'; it must be greater than 0"),
        (["--turns", "1001"], 2, "--turns is '1001'; it must be from 1 to 1000"),
        (["--num-prompts", "0"], 2, "--num-prompts is '0'; it must be from 1 to 1000000"),
        (["--only", "both"], 2, "--only is 'both'; it must be 'on' or 'off'"),
        (["--n", "4"], 2, "--n is 4; it must be 1"),
        (["--policy", "off"], 2, "--policy off is plain decoding: give --only off"),
        (["--no-speculative", "--only", "on"], 2, "--no-speculative is plain decoding"),
        (["--temperature", "101"], 1, "temperature is 101.0; it must be 0 or a number from 0.01 to 100"),
        (["--draft-window", "4"], 1, "speculative.draft_window is 4; it must be absent, or policy FIXED with it"),
        (["--json", "/no/such/file"], 1, "--json is /no/such/file; it must be a file in a folder that exists"),
        (["--picture", "bench.txt"], 1, "--picture is bench.txt; its name must end with .png, .svg, .pdf"),
        (["--prompts", "/no/such/file"], 1, "--prompts /no/such/file cannot be read: No such file or directory"),
        (["pipeline"], 2, "pipeline is not known; see specdec bench --help"),
        ([], 1, "no connection to ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused; check"),
    ],
    ids=lambda own: " ".join(own) if isinstance(own, list) else "",
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], code: int, expected: str) -> None:
    """Claim: a bad value is refused by name, value and limit before anything is sent, and a server that is not there in
    the words of `specdec generate`. Conclusive: nothing listens at the address, so that a request would fail with the
    last line's words."""
    with pytest.raises(SpecdecError) as raised:
        run_command(["bench", "--address", "127.0.0.1:1", *arguments])
    assert raised.value.exit_code == code and expected in str(raised.value)


def test_prompts_of_each_form(tmp_path: Path) -> None:
    """Claim: a text file has a prompt a line, empty ones left out; a .jsonl file has texts, or messages as the chat
    template of --model writes them, other names ignored; without a file there are the shipped ones."""
    text, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text('one\n\n{"prompt": "two"}\r\n  three')
    assert read_prompts(text, "") == ["one", '{"prompt": "two"}', "  three"]
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    entries = [{"prompt": "a\nb\u2028c", "id": 1}, {"messages": messages, "output_tokens": 5}]
    lines.write_text("".join(f"{json.dumps(entry, ensure_ascii=False)}\n" for entry in entries), "utf-8")
    template = ChatTemplate.read(CHAT_DRAFT)
    assert template is not None
    assert read_prompts(lines, str(CHAT_DRAFT)) == ["a\nb\u2028c", template.encode(messages)]
    assert read_prompts(None, "") == list(heldout_prompts().values())


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"\n \n", "has 0 prompts; it must have at least 1"),
        (b'{"prompt": "a"}\n{"prompt": ', "line 2 is not valid JSON: "),
        (b'{"text": "a"}', 'line 1 is {"text": "a"}; it must be an object with prompt or messages, one of the two'),
        (b'["a"]', 'line 1 is ["a"]; it must be an object'),
        (b'\n{"prompt": "a", "messages": []}', "line 2 is"),
        (b'{"prompt": 5}', "line 1: prompt is 5; it must be a text that is not empty"),
        (
            b'{"messages": [{"role": "user"}]}',
            'line 1: messages is [{"role": "user"}]; it must be a list of at least one',
        ),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "has messages: give --model"),
        (b'{"prompt": "\xff"}', "is not UTF-8: invalid start byte at byte 12"),
    ],
)
def test_a_bad_line_is_named(content: bytes, expected: str, tmp_path: Path) -> None:
    """Claim: what is no prompt is refused with its line and value."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read_prompts(file, "")


def test_concurrency_takes_several_values(tmp_path: Path) -> None:
    """Claim: values may follow one flag, several flags, or commas, in the environment too; absent there is one at once,
    and with a rate no limit."""
    entry = COMMANDS["bench"]

    def loads(*arguments: str, **environment: str) -> tuple[int, ...]:
        parser = make_parser("bench", entry.summary, entry.settings)
        settings = read_settings(entry.settings, parser, arguments, environment, KNOWN_FIELDS)
        assert isinstance(settings, BenchSettings)
        return settings.loads

    assert loads("--concurrency", "1", "8", "32", "--rate", "5") == (1, 8, 32)
    assert loads("--concurrency", "1", "--seed", "5", "--concurrency", "8,32") == (1, 8, 32)
    assert loads(SPECDEC_CONCURRENCY="[1, 8]") == loads(SPECDEC_CONCURRENCY="1,8") == (1, 8)
    assert loads() == (1,) and loads("--rate", "0.5") == (0,)


def cell_of(most: int, low: float, high: float, count: int = 12, rate: float | str = "inf") -> dict[str, Any]:
    """A measurement with such an interval of both ratios that a sentence may use."""
    ratio = {"median": (low + high) / 2, "low": low, "high": high, "pair_count": count}
    names = ("mean_e2el_ms",) if rate != "inf" else ("output_throughput",)
    return {"max_concurrency": most or None, "request_rate": rate, "ratios": dict.fromkeys(names, ratio)}


def test_the_sentence_says_whether_it_pays() -> None:
    """Claim: speculation pays where the whole interval of throughput is above 1 and costs where it is below, at a rate
    the other way round by latency; an interval around 1, or fewer than 6 turns, has no verdict."""
    cells = [cell_of(1, 1.25, 1.75), cell_of(8, 1.0, 1.5), cell_of(32, 0.5, 0.9), cell_of(64, 1.1, 1.3)]
    assert sentence_of({"cells": cells}) == (
        "Speculation pays with 1 at once (1.50 [1.25, 1.75]) and with 64 at once (1.20 [1.10, 1.30]); it makes no "
        "difference that can be told with 8 at once (1.25 [1.00, 1.50]); it costs time with 32 at once (0.70 [0.50, "
        "0.90]): output tokens a second, on / off, 95 % interval of 12 turns."
    )
    at_rate = [cell_of(0, 0.5, 0.75, rate=2.5), cell_of(4, 1.5, 2.0, 9, rate=2.5)]
    assert sentence_of({"cells": at_rate}) == (
        "Speculation pays with 2.5 requests a second (0.62 [0.50, 0.75]); it costs time with 4 at once, 2.5 requests "
        "a second (1.75 [1.50, 2.00]): end-to-end latency, on / off, 95 % interval of 9 to 12 turns."
    )
    few = sentence_of({"cells": [cell_of(1, 1.25, 1.75, 5)]})
    assert few.startswith("Speculation cannot be judged by fewer than 6 turns with 1 at once")
    assert sentence_of({"cells": [{"ratios": {}, "request_rate": "inf"}]}) == ""
