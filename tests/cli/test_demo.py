"""`specdec demo` as a user runs it: real processes, on the embedded pair; no time is judged."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

import pytest

from specdec.cli.demo import PROMPT_IDS, misses_of
from specdec.cli.demo_texts import DemoText
from specdec.cli.demo_view import closing_line
from specdec.client.run import Run
from specdec.folders import heldout_prompts

TOKENS = 128
COMMAND = [sys.executable, "-m", "specdec.cli", "demo", "--max-tokens", str(TOKENS)]
CONTROL_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


@pytest.fixture(scope="module")
def report() -> dict:
    """The output of `specdec demo --json`: all of standard output is one object, standard error is empty."""
    done = subprocess.run([*COMMAND, "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.more
@pytest.mark.lengthy
def test_json_is_one_object_of_equal_texts(report):
    """Claim: every prompt has a text of full length, the same with speculation and without, and draft tokens were
    accepted; the test compares the tokens of both generations itself."""
    assert [text["prompt_id"] for text in report["texts"]] == list(PROMPT_IDS)
    for text in report["texts"]:
        assert text["on_token_ids"] == text["off_token_ids"] and len(text["on_token_ids"]) == TOKENS
        assert text["prompt"] == heldout_prompts()[text["prompt_id"]] and text["text"]
        assert text["ratio"] == pytest.approx(text["on_tokens_per_s"] / text["off_tokens_per_s"])
    assert report["is_equal"] and 0 < report["acceptance"] < 1
    memory = report["memory_peak_bytes"]
    assert list(memory) == ["target", "draft", "coordinator"] and min(memory.values()) > 10_000_000


@pytest.mark.more
@pytest.mark.lengthy
def test_without_a_terminal_the_texts_and_the_table_are_plain(report):
    """Claim: piped, the demo prints the prompts, the texts that --json reports for the same seed, the sampling
    parameters, the sentence and the table, without a control code."""
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and done.stderr == "" and not CONTROL_CODE.search(done.stdout)
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    for text in report["texts"]:
        lines = [line.rstrip() for line in (text["prompt"] + text["text"]).splitlines()]
        start = next(i for i, line in enumerate(printed) if line.startswith(f"held-out prompt {text['prompt_id']} "))
        assert printed[start + 1 : start + 1 + len(lines)] == lines
        assert printed[start + 1 + len(lines)].startswith("with speculation ")
    assert f"temperature {report['temperature']:g}, seed {report['seed']}, {TOKENS} tokens" in done.stdout
    assert re.search(r"\nThe same texts came .* accepted .*│ +all │", done.stdout, re.DOTALL)
    assert re.fullmatch(r"Memory at most: target \d+ MB, draft \d+ MB, coordinator \d+ MB\.", printed[-2])
    assert printed[-1] == "Each text had the same tokens with speculation and without."


@pytest.mark.more
@pytest.mark.lengthy
def test_on_a_terminal_tokens_are_in_colour_and_rates_are_live():
    """Claim: on a terminal accepted tokens are green and recovered ones yellow, and the line of rates is drawn
    before the rate without speculation is known, for each text: it is live. Conclusive: the demo runs on a
    pseudo-terminal, and its whole output is read; the first line of a text is drawn before its first token."""
    reading, writing = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "60"}
    with subprocess.Popen(COMMAND, stdout=writing, stderr=subprocess.PIPE, env=environment) as process:
        os.close(writing)
        written = b""
        while data := read_or_end(reading):
            written += data
        assert process.wait(60) == 0
    os.close(reading)
    shown = written.decode()
    assert "\x1b[32m" in shown and "\x1b[33m" in shown
    assert shown.count("without ...") >= len(PROMPT_IDS) and "times as fast" in shown
    assert "The same texts came" in CONTROL_CODE.sub("", shown)


def read_or_end(descriptor: int) -> bytes:
    """Some bytes; none once the other end of a pseudo-terminal is closed, which Linux reports as an error."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def text_of(prompt_id: int, ratio: float, is_equal: bool = True) -> DemoText:
    """A text that took 1 s without speculation, and was `ratio` times as fast with it."""
    on, off = (Run([1, 2, 3], deltas=[(5.0, 1), (5.0 + seconds, 2)]) for seconds in (1 / ratio, 1.0))
    if not is_equal:
        off.token_ids[1] = 9
    return DemoText(prompt_id, "", (), on, off)


def test_check_names_the_bars_that_are_missed():
    """Claim: --check wants 1.25 of the median and 1 of every text, and reports each missed bar with its ratio; at the
    bars nothing is missed. Ratios are given, so nothing depends on the machine."""
    assert misses_of([text_of(1, 1.0), text_of(2, 1.25), text_of(3, 1.5)]) == []
    assert misses_of([text_of(1, 0.9), text_of(2, 1.2), text_of(3, 1.5)]) == [
        "the median of the texts: 1.20 times as fast with speculation, it must be at least 1.25",
        "prompt 1: 0.90 times as fast with speculation, it must be at least 1",
    ]


def test_a_text_that_differs_is_called_a_defect():
    """Claim: the last line names each prompt whose texts differ by one token, and no other."""
    texts = [text_of(4, 1.3, is_equal=False), text_of(6, 1.3)]
    assert closing_line(texts).startswith("DIFFERENT TOKENS") and "prompt 4:" in closing_line(texts)
    assert closing_line(texts[1:]).startswith("Each text had the same tokens")
