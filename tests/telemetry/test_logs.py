"""Log lines: their fields, and the texts they never contain."""

from __future__ import annotations

import contextvars
import io
import json
import logging
import re
import sys

import pytest
import structlog

from specdec.telemetry.logs import OWN_MODULES, WITHHELD_FIELDS, bind, configure_logs, get_logger
from specdec.terminal import printable


@pytest.fixture(autouse=True)
def restored():
    """Logging as it was before the test."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    logging.getLogger(OWN_MODULES).handlers = []


def lines(capsys) -> list[dict]:
    """Lines on standard error; standard output must be empty, since it belongs to the command."""
    written = capsys.readouterr()
    assert written.out == ""
    return [json.loads(line) for line in written.err.splitlines()]


def test_lines_are_json_with_service_and_bound_fields(capsys):
    """Fields bound in a request's task stand on its every line, also of loggers made before, and on no other."""
    logger = get_logger(component="specdec.test")
    configure_logs("info", "target")

    def request() -> None:
        bind(trace_id="ab", session=7)
        logger.info("opened", length=3)

    contextvars.copy_context().run(request)  # as a task of its own
    logger.info("idle")
    logger.debug("not severe enough")
    inside, after = lines(capsys)
    assert (inside["event"], inside["service"], inside["level"], inside["length"]) == ("opened", "target", "info", 3)
    assert (inside["trace_id"], inside["session"], inside["component"]) == ("ab", 7, "specdec.test")
    assert "trace_id" not in after and after["service"] == "target"


def test_texts_are_withheld(capsys):
    """Prompts and outputs do not reach a log, even when code logs them by mistake."""
    configure_logs("info", "coordinator")
    get_logger().info("mistake", **{name: "my secret" for name in WITHHELD_FIELDS})
    assert "my secret" not in str(lines(capsys))


def test_exceptions_are_on_one_line(capsys):
    """A traceback is a field, so a line is an event for log collectors."""
    configure_logs("info", "draft")
    try:
        raise ValueError("wrong")
    except ValueError:
        get_logger().exception("failed")
    (line,) = lines(capsys)
    assert line["event"] == "failed" and line["exception"][0]["exc_value"] == "wrong"


def test_exceptions_are_logged_without_values(capsys):
    """A traceback names places, never the values of variables: those hold prompts and texts."""
    configure_logs("info", "target")
    secret = "text of a user"
    try:
        raise ValueError("a defect")
    except ValueError:
        get_logger().exception("failed")
    (line,) = lines(capsys)
    assert line["exception"][0]["exc_type"] == "ValueError"
    assert secret not in json.dumps(line) and "locals" not in json.dumps(line)


def test_lines_of_the_engine_look_like_all_others(capsys):
    """A record of the standard library is a line of the same form, traceback and level included."""
    configure_logs("info", "target")
    logger = logging.getLogger("specdec.engine")
    try:
        raise ValueError("wrong")
    except ValueError:
        logger.exception("a step of %d rows failed", 3)
    logger.debug("not severe enough")
    (line,) = lines(capsys)
    assert (line["event"], line["service"], line["level"]) == ("a step of 3 rows failed", "target", "error")
    assert line["component"] == "specdec.engine" and line["exception"][0]["exc_value"] == "wrong"


HOSTILE = "a\x1b]0;owned\x07\x9b2J\n\u202e\x7f"


class Screen(io.StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "file"])
def test_a_label_commands_no_terminal(is_terminal, monkeypatch):
    """Claim: control characters of a client's label, of an event, of a value within others, of a library's line and of
    an error's message are shown as \\uXXXX, and a line stays one, on a terminal and in JSON, where it still means the
    same. Conclusive: the written characters are searched; without specdec's own colours none is left."""
    screen = Screen() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    configure_logs("info", HOSTILE)
    get_logger().info(HOSTILE, label=HOSTILE, inner=[HOSTILE], key={HOSTILE: HOSTILE})
    logging.getLogger("specdec.engine").warning("%s", HOSTILE)
    assert len(screen.getvalue().splitlines()) == 2
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        get_logger().exception("failed", label=HOSTILE)
    written = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())
    assert [char for char in written if printable(char) != char] == []
    assert written.count("owned") >= 7
    if not is_terminal:
        first = json.loads(written.splitlines()[0])
        assert first["label"] == first["event"] == first["inner"][0] == HOSTILE
