"""Log lines: their fields, the texts they never contain, and readers that do not take them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
import tty
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from specdec.telemetry.logs import (
    LAST_WORDS_S,
    OWN_MODULES,
    WAITING_BYTES_MAX,
    WITHHELD_FIELDS,
    bind,
    configure_logs,
    flush_logs,
    get_logger,
    lost_line_count,
)
from specdec.terminal import printable

# A service's logging in a process of its own; the test adds what it does.
PREFACE = "import sys, os, time; from specdec.telemetry.logs import *; configure_logs('info', 'target'); "


@pytest.fixture(autouse=True)
def restored():
    """Logging as it was before the test."""
    root, stderr = logging.getLogger(), sys.stderr
    handlers = list(root.handlers)
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    logging.getLogger(OWN_MODULES).setLevel(logging.NOTSET)
    logging.captureWarnings(False)
    root.handlers, sys.stderr = handlers, stderr


def lines(capfd) -> list[dict]:
    """Lines on standard error; standard output must be empty, since it belongs to the command."""
    assert flush_logs(10.0)
    written = capfd.readouterr()
    assert written.out == ""
    return [json.loads(line) for line in written.err.splitlines()]


def test_lines_are_json_with_service_and_bound_fields(capfd):
    """Fields bound in a request's task stand on its every line, also of loggers made before, and on no other."""
    logger = get_logger(component="specdec.test")
    configure_logs("info", "target")

    def request() -> None:
        bind(trace_id="ab", session=7)
        logger.info("opened", length=3)

    contextvars.copy_context().run(request)  # as a task of its own
    logger.info("idle")
    logger.debug("not severe enough")
    inside, after = lines(capfd)
    assert (inside["event"], inside["service"], inside["level"], inside["length"]) == ("opened", "target", "info", 3)
    assert (inside["trace_id"], inside["session"], inside["component"]) == ("ab", 7, "specdec.test")
    assert "trace_id" not in after and after["service"] == "target"


def test_texts_are_withheld(capfd):
    """Prompts and outputs do not reach a log, even when code logs them by mistake."""
    configure_logs("info", "coordinator")
    get_logger().info("mistake", **{name: "my secret" for name in WITHHELD_FIELDS})
    assert "my secret" not in str(lines(capfd))


def test_exceptions_are_on_one_line(capfd):
    """A traceback is a field, so a line is an event for log collectors."""
    configure_logs("info", "draft")
    try:
        raise ValueError("wrong")
    except ValueError:
        get_logger().exception("failed")
    (line,) = lines(capfd)
    assert line["event"] == "failed" and line["exception"][0]["exc_value"] == "wrong"


def test_exceptions_are_logged_without_values(capfd):
    """A traceback names places, never the values of variables: those hold prompts and texts."""
    configure_logs("info", "target")
    secret = "text of a user"
    try:
        raise ValueError("a defect")
    except ValueError:
        get_logger().exception("failed")
    (line,) = lines(capfd)
    assert line["exception"][0]["exc_type"] == "ValueError"
    assert secret not in json.dumps(line) and "locals" not in json.dumps(line)


def test_lines_of_the_engine_look_like_all_others(capfd):
    """A record of the standard library is a line of the same form, traceback and level included."""
    configure_logs("info", "target")
    logger = logging.getLogger("specdec.engine")
    try:
        raise ValueError("wrong")
    except ValueError:
        logger.exception("a step of %d rows failed", 3)
    logger.debug("not severe enough")
    (line,) = lines(capfd)
    assert (line["event"], line["service"], line["level"]) == ("a step of 3 rows failed", "target", "error")
    assert line["component"] == "specdec.engine" and line["exception"][0]["exc_value"] == "wrong"


class Unspeakable:
    """A value whose text raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_what_cannot_be_formatted_never_reaches_the_caller(capfd):
    """Claim: a field without text, a surrogate, a cycle, and arguments that do not fit their format cost a field or a
    line its text, never its caller an exception; each leaves a line that is JSON.

    Source: an exception of a log line ended the generation that it was about. Conclusive: the calls stand bare, and
    each of the first three raises in the formatting itself.
    """
    configure_logs("info", "target")
    root = logging.getLogger()
    root.handlers = root.handlers[-1:]  # without pytest's own, which do raise
    cycle: list = []
    cycle.append(cycle)
    get_logger().info("no text", field=Unspeakable())
    get_logger().info("surrogate", field="\udc80")
    get_logger().info("cycle", field=cycle)
    logging.getLogger("specdec.engine").warning("%d rows", "many")
    logging.getLogger("library").log(35, "a level of its own")
    found = lines(capfd)
    assert [line["event"] for line in found] == ["no text", "surrogate", "cycle", "%d rows", "a level of its own"]
    assert (
        "Unspeakable" in found[0]["field"] and found[1]["field"] == "\udc80" and found[2]["unreadable"] == "ValueError"
    )


def test_what_python_itself_says_goes_the_same_way(capfd):
    """Claim: warnings, lines of libraries, also of those that took hold of standard error before, of asyncio about a
    forgotten exception, and tracebacks of threads come out through the same thread. Conclusive: `sys.stderr` has no
    other way to the descriptor, and each text is there."""
    early = logging.getLogger("early library")
    early.addHandler(logging.StreamHandler(sys.__stderr__))
    early.propagate = False
    configure_logs("info", "target")
    early.warning("of a library")
    warnings.warn("of Python", stacklevel=1)

    async def forget() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0.01)

    asyncio.run(forget())
    hook = threading.excepthook
    threading.excepthook = threading.__excepthook__  # not pytest's
    thread = threading.Thread(target=lambda: [][0])
    thread.start()
    thread.join()
    threading.excepthook = hook
    assert flush_logs(10.0)
    text = capfd.readouterr().err
    assert not early.handlers and '"early library", "event": "of a library"' in text
    assert "of Python" in text and '"component": "asyncio"' in text and "IndexError" in text


def lost(script: str, stderr: int, timeout_s: float = 60.0) -> tuple[int, float]:
    """Runs a script after PREFACE; returns its exit code and how many lines it says were lost."""
    command = [sys.executable, "-c", PREFACE + script + "; flush_logs(0.2); print(lost_line_count())"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, timeout=timeout_s)
    return done.returncode, float(done.stdout)


def test_a_reader_that_has_gone_and_a_full_disk_cost_lines_only():
    """Claim: without a reader, and with a full disk, each line is lost and counted, its caller sees nothing, and the
    process ends as it would. Conclusive: real descriptors, whose every write fails."""
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full", "wb") as full:
        for descriptor in (writing, full.fileno()):
            assert lost("[get_logger().info('line') for _ in range(50)]", descriptor) == (0, 50)
    os.close(writing)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_pipe_without_reading_costs_lines_only_and_the_rest_is_read_later(is_blocking):
    """Claim: with a pipe that is not read, a caller goes on at once, at most WAITING_BYTES_MAX wait, and the process
    ends within LAST_WORDS_S of its end; once the pipe is read, the first lines and all that fitted come in order, and
    lines say how many were lost. The same on a descriptor that a neighbour has set to fail instead of blocking.

    Conclusive: the lines are three times what may wait, so a caller that waited for the pipe would never end.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, is_blocking)
    count = 3 * WAITING_BYTES_MAX // 1000
    script = f"[get_logger().info('x' * 1000, number=at) for at in range({count})]; print('logged', flush=True); "
    script += (
        "sys.stdin.readline(); flush_logs(30); get_logger().info('last'); flush_logs(30); print(lost_line_count())"
    )
    command = [sys.executable, "-c", PREFACE + script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, stderr=writing, text=True, **pipes) as process:
        os.close(writing)
        assert process.stdout.readline() == "logged\n"
        pieces: list[bytes] = []
        thread = threading.Thread(target=lambda: pieces.extend(iter(lambda: os.read(reading, 1 << 16), b"")))
        thread.start()
        process.stdin.write("\n")
        process.stdin.flush()
        lost_count = int(process.stdout.readline())
        assert process.wait(30) == 0
    thread.join()
    os.close(reading)
    found = [json.loads(line) for line in b"".join(pieces).splitlines()]
    numbers = [line["number"] for line in found if "number" in line]
    first_count = WAITING_BYTES_MAX // 2000  # those after them may fit again, as the pipe itself takes some
    assert numbers[:first_count] == list(range(first_count)) and numbers == sorted(set(numbers))
    reports = [line for line in found if line["event"] == "log lines were lost"]
    assert count // 3 < count - len(numbers) <= lost_count < count - len(numbers) + 100  # a report can be lost too
    assert reports[-1]["total"] == lost_count
    assert found[-1]["event"] == "last"


def test_a_process_whose_pipe_is_never_read_ends():
    """Claim: a blocked standard error delays the end of the process by LAST_WORDS_S, and a traceback that ends one
    comes out if there is a reader. Conclusive: the pipe stays full; the bound is a multiple, for a busy machine."""
    reading, writing = os.pipe()
    began_s = time.monotonic()
    assert lost("[get_logger().info('x' * 1000) for _ in range(3000)]", writing)[0] == 0
    assert time.monotonic() - began_s < 20 * LAST_WORDS_S
    os.close(reading)
    os.close(writing)
    command = [sys.executable, "-c", PREFACE + "get_logger().info('first'); raise ValueError('last words \\udc80')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "ValueError: last words \\udc80"
    assert json.loads(done.stderr.splitlines()[0])["event"] == "first"


def test_a_torn_line_spoils_no_other(tmp_path: Path):
    """Claim: where a full disk took a part of a line, the next one begins on a line of its own, once there is space.
    Conclusive: the kernel's limit of a file's size cuts a line in the middle."""
    log = tmp_path / "log"
    script = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    script += (
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]; resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard)); "
    )
    script += "get_logger().info('torn'); flush_logs(); resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)); "
    script += "get_logger().info('whole')"
    with log.open("wb") as writing:
        assert lost(script, writing.fileno()) == (0, 1)
    first, second, third = log.read_text().splitlines()
    assert len(first) == 50 and json.loads(second)["event"] == "whole" and json.loads(third)["lines"] == 1
    assert lost_line_count() == 0, "of this process"


HOSTILE = "a\x1b]0;owned\x07\x9b2J\n\u202e\x7f"


@contextlib.contextmanager
def standard_error(descriptor: int) -> Iterator[None]:
    """Gives descriptor 2 of this process to another pipe or terminal, and closes its end here."""
    before = os.dup(2)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def read_available(descriptor: int) -> str:
    """What was written, piece by piece, as a terminal gives it."""
    pieces = []
    while select.select([descriptor], [], [], 0.2)[0]:
        pieces.append(os.read(descriptor, 1 << 16))
    return b"".join(pieces).decode()


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "pipe"])
def test_a_label_commands_no_terminal(is_terminal):
    """Claim: control characters of a client's label, of an event, of a value within others, of a library's line and of
    an error's message are shown as \\uXXXX, and a line stays one, on a terminal and in JSON, where it still means the
    same. Conclusive: the written characters are searched; without specdec's own colours none is left."""
    reading, writing = pty.openpty() if is_terminal else os.pipe()
    if is_terminal:
        tty.setraw(writing)  # else the terminal writes ends of lines its own way
    with standard_error(writing):
        configure_logs("info", HOSTILE)
        get_logger().info(HOSTILE, label=HOSTILE, inner=[HOSTILE], key={HOSTILE: HOSTILE})
        logging.getLogger("specdec.engine").warning("%s", HOSTILE)
        assert flush_logs(10.0)
        first = read_available(reading)
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            get_logger().exception("failed", label=HOSTILE)
        assert flush_logs(10.0)
        written = first + read_available(reading)
    os.close(reading)
    assert len(first.splitlines()) == 2
    written = re.sub(r"\x1b\[[\d;]*m", "", written)
    assert [char for char in written if printable(char) != char] == []
    assert written.count("owned") >= 7
    if not is_terminal:
        first = json.loads(written.splitlines()[0])
        assert first["label"] == first["event"] == first["inner"][0] == HOSTILE
