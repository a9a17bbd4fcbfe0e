"""What reaches a terminal: text, whatever a client, a model, a peer or a file has put into names and messages."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import grpc
import pytest
from rich.table import Table

from specdec.distill.plans import records_of
from specdec.errors import ConfigError
from specdec.rpc.status import status_from_error
from specdec.streams import warn
from specdec.telemetry.progress import loading_bar
from specdec.terminal import make_console, print_text, printable, printable_line
from specdec.v1 import coordinator_service_pb2 as pb
from tests.support.services import MODELS

# The title is set, the screen cleared, what was printed hidden, a line overwritten, words turned round.
HOSTILE = "a\x1b]0;owned\x07b\x1b[2Jc\x9b31md\x1b[8me\rf\x08g\x7fh\u202ei\u2066j\x00k"
SHOWN = r"a\u001b]0;owned\u0007b\u001b[2Jc\u009b31md\u001b[8me\u000df\u0008g\u007fh\u202ei\u2066j\u0000k"
OWN_COLORS = re.compile(r"\x1b\[(?!8m)[\d;]*m")  # 8 hides what follows: specdec never does
OVERRIDES = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
SPECDEC = [sys.executable, "-m", "specdec.cli"]


def commands_in(screen: str) -> list[str]:
    """The characters that a terminal takes for commands, beside specdec's own colours, by Unicode's own tables."""
    return [
        char
        for char in OWN_COLORS.sub("", screen)
        if (unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") and char not in "\n\t")
        or unicodedata.bidirectional(char) in OVERRIDES
    ]


def screen_of(command: list[str], **environment: str) -> str:
    """What a command shows on a terminal that is its standard output and error; lines end in a newline only."""
    reading, writing = pty.openpty()
    with subprocess.Popen(command, stdin=writing, stdout=writing, stderr=writing, env=os.environ | environment):
        os.close(writing)
        shown = b""
        while True:
            try:
                shown += os.read(reading, 65536)
            except OSError:  # the other end is closed
                break
    os.close(reading)
    return shown.decode().replace("\r\n", "\n")


def test_every_control_character_is_shown_and_no_other() -> None:
    """Claim: each control character of C0 but tab and newline, DEL, C1, each separator of lines, each half of a
    surrogate pair and each override or isolate of direction is shown as \\uXXXX, and no other character changes; on a
    line tabs and newlines are shown too. Source: Unicode's categories and bidirectional classes. Conclusive: all code
    points; what is shown has nothing to show, and means the same in JSON."""
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        is_command = bool(commands_in(char))
        assert printable(char) == (f"\\u{code:04x}" if is_command else char)
        assert printable_line(char) == (f"\\u{code:04x}" if is_command or char in "\t\n" else char)
    assert printable(HOSTILE) == SHOWN == printable(SHOWN)
    assert json.loads(printable(json.dumps(HOSTILE, ensure_ascii=False))) == HOSTILE


def test_lines_and_tables_hold_text_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: sentences, errors, tables, rules and bars show a name's control characters, on a terminal too; brackets in
    a name are no markup, which could raise an error or make a link, and braces none of Python's. Conclusive: the name
    is in each place where a command prints one."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    name = HOSTILE + "[link=http://x][/b]{0}:smile:"
    print_text(name)
    warn(f"{name}\n\tand")
    for console in (make_console(), make_console(is_for_errors=True, has_highlights=False)):
        table = Table(title=name)
        table.add_column(name)
        table.add_row(name)
        console.print(name, table)
        console.rule(name)
    written = capsys.readouterr()
    out, err = (OWN_COLORS.sub("", part) for part in (written.out, written.err))
    for part in (out, err):
        assert part.count("\\u001b]0;owned") >= 4 and commands_in(part) == []
        assert part.count("[link=http://x][/b]{0}:smile:") >= 3, "beside a title that is broken into lines"
    assert f"specdec: {SHOWN}[link=http://x][/b]{{0}}:smile: and\n".replace(r"\u000df", " f") in err
    monkeypatch.setattr("specdec.telemetry.progress.is_watched", lambda: True)
    with loading_bar("{0}[/b]" + HOSTILE) as progress:
        progress("loading", 0.5)
    bar = re.sub(r"\x1b\[[\d;?]*[mhlAK]", "", capsys.readouterr().err).replace("\r", "")
    assert "{0}[/b]a\\u001b]0;owned" in bar and commands_in(bar) == []


class Peer:
    """A coordinator that answers with hostile words: to the prompt "fail" by an error, else by a text."""

    async def __aenter__(self) -> str:
        self._server = grpc.aio.server()
        handler = grpc.unary_stream_rpc_method_handler(self._generate, pb.GenerateRequest.FromString)
        services = {"Generate": handler}
        name = "specdec.v1.CoordinatorService"
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, services),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def _generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext):
        if request.text == "fail":
            details = status_from_error(ConfigError(HOSTILE)).SerializeToString()
            await context.abort(
                grpc.StatusCode.INTERNAL, HOSTILE.replace("\0", ""), (("grpc-status-details-bin", details),)
            )
        kinds = [pb.TOKEN_KIND_ACCEPTED, pb.TOKEN_KIND_BONUS]
        text = TEXT + HOSTILE
        lengths = [len(TEXT), len(HOSTILE)]
        delta = pb.Delta(token_ids=[1, 2], kinds=kinds, text=text, text_lengths=lengths)
        yield pb.GenerateResponse(delta=delta).SerializeToString()
        yield pb.GenerateResponse(finished=pb.Finished(trace_id=HOSTILE)).SerializeToString()


TEXT = "def f():\n\treturn 'שלום ü 👩‍💻'\n"


async def test_a_generated_text_commands_no_terminal() -> None:
    """Claim: `specdec generate` shows what a model or a coordinator sends, text, trace id and error, without control
    characters on a terminal, in colours and without, and with --json; newlines, tabs and letters of all scripts stay. A
    pipe gets the text as it is. Conclusive: real processes, a real server and a pseudo-terminal."""
    async with Peer() as address:
        told = ["generate", "--address", address]
        for flags, environment in (([], {}), ([], {"NO_COLOR": "1"}), (["--json"], {})):
            screen = await asyncio.to_thread(screen_of, [*SPECDEC, *told, *flags, "go"], **environment)
            assert commands_in(screen) == [] and "\\u001b]0;owned" in screen
            assert (OWN_COLORS.sub("", screen).startswith(TEXT + SHOWN)) == (not flags)
        screen = await asyncio.to_thread(screen_of, [*SPECDEC, *told, "fail"])
        assert commands_in(screen) == [] and screen.startswith("specdec: a\\u001b]0;owned")
        piped = [*SPECDEC, *told, "go"]
        done = await asyncio.to_thread(subprocess.run, piped, capture_output=True)
        assert done.stdout.decode() == TEXT + HOSTILE + "\n"


def test_names_of_files_and_settings_command_no_terminal(tmp_path: Path) -> None:
    """Claim: an error that names a key or a value of a configuration, a model, a file, a template's words or a flag is
    one line without control characters. Conclusive: real commands on a pseudo-terminal; each line holds the name."""
    name = HOSTILE.replace("\0", "").replace("/", "")
    keyed, valued = tmp_path / "keyed.yaml", tmp_path / "valued.yaml"
    keyed.write_text(json.dumps({name: 1}))
    valued.write_text(json.dumps({"address": name, "policy": name}))
    talker = tmp_path / "talker"
    shutil.copytree(MODELS / "target", talker)
    (talker / "chat_template.jinja").write_text(f"{{{{ raise_exception({json.dumps(name)}) }}}}")
    asking = (
        "import io, sys; from specdec.cli import main; sys.stdin = io.StringIO('hi\\n'); "
        f"sys.argv = ['specdec', 'chat', '--model', {str(talker)!r}, '--address', '127.0.0.1:1']; main.main()"
    )
    for command in (
        [*SPECDEC, "generate", "x", "--config", str(keyed)],
        [*SPECDEC, "generate", "x", "--config", str(valued)],
        [*SPECDEC, name],
        [*SPECDEC, "chat", "--model", name],
        [*SPECDEC, "trace", "--file", name],
        [sys.executable, "-c", asking],
    ):
        screen = screen_of(command)
        assert commands_in(screen) == [] and screen.strip("\n").count("\n") == 0, screen
        assert re.search(r"\\u?(001b|x1b)\]0;owned", screen), screen


DEFECTS = """
import asyncio, logging, threading
from specdec.cli import main
def run_command(_):
    thread = threading.Thread(target=int, args=(words,))
    thread.start()
    thread.join()
    asyncio.new_event_loop().call_exception_handler({"message": words})
    logging.getLogger("library").warning(words)
    raise ValueError(words)
main.run_command = run_command
main.main("generate")
"""


def test_a_defect_commands_no_terminal() -> None:
    """Claim: the traceback of an error that no part expects, of a thread and of a task too, and a library's own line
    are text only. Conclusive: such errors, raised where a command runs, with the words of a peer; all four are seen."""
    words = HOSTILE.replace("\0", "") + "\udce9"
    screen = screen_of([sys.executable, "-c", f"words = {words!r}{DEFECTS}"])
    assert commands_in(screen) == [] and len(re.findall(r"a\\(u001b|x1b)\]0;owned", screen)) == 4, screen


def test_a_trace_commands_no_terminal(tmp_path: Path) -> None:
    """Claim: `specdec trace` shows the names, services, events and errors of spans without control characters, as a
    picture and as JSON. Conclusive: each of them is hostile, in a file as a collector writes it."""
    ids = {"traceId": "ab" * 16, "startTimeUnixNano": "1000000000", "endTimeUnixNano": "3000000000"}
    error = {"status": {"code": 2, "message": HOSTILE}, "attributes": [text("error.type", HOSTILE)]}
    events = [{"name": HOSTILE, "timeUnixNano": "2000000000", "attributes": [text("exception.message", HOSTILE)]}]
    spans = [
        ids | error | {"name": "Generate", "spanId": "01" * 8, "kind": 2, "events": events},
        ids | error | {"name": HOSTILE, "spanId": "02" * 8, "parentSpanId": "01" * 8, "kind": 1, "events": events},
    ]
    groups = [
        {"resource": {"attributes": [text("service.name", name)]}, "scopeSpans": [{"spans": [span]}]}
        for name, span in zip(("specdec-coordinator", HOSTILE), spans)
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"resourceSpans": groups}))
    for flags in ([], ["--json"]):
        screen = screen_of([*SPECDEC, "trace", "--file", str(file), *flags], COLUMNS="300")
        assert commands_in(screen) == []
        assert "Generate" in screen and "owned" in screen or flags, screen


def text(key: str, value: str) -> dict:
    """An attribute of a span or resource."""
    return {"key": key, "value": {"stringValue": value}}


def test_a_record_that_is_told_commands_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: what `specdec distill` tells about a file with a hostile name is text. Conclusive: its own console."""
    file = tmp_path / HOSTILE.replace("\0", "")
    line = '{"prompt_ids": [1], "output_ids": [], "accepted": "", "temperature": 0}\n'
    file.write_text(f"{line}half\n{line}")
    console = make_console(is_for_errors=True)
    records_of(file, 10, lambda told: console.print(told, soft_wrap=True))
    shown = capsys.readouterr().err
    assert "1 of 3 lines" in shown and commands_in(shown) == []
