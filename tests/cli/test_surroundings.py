"""What is beside the work and stops no service: standard streams, home folders, locales, working folders.

Each test takes one of them away from a real process.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from specdec.engine.table_model import write_table_model
from specdec.errors import ModelRefused
from specdec.folders import cache_folder, local_folder
from specdec.launch.children import python_command
from specdec.process_watch import __file__ as watch_program
from tests.support.engine_models import make_tiny_model
from tests.support.ports import free_port
from tests.support.services import Client
from tests.support.waiting import until

SPECDEC = python_command("-m", "specdec.cli")
CLOSED = "<&- >&- 2>&-"
RENUMBER = ["unshare", "--user", "--map-user=54321", "--map-group=54321"]
is_renumbered = subprocess.run([*RENUMBER, "true"], capture_output=True, check=False).returncode == 0
UNSHARE = ["unshare", "--mount", "sh", "-c", 'mount -o remount,bind,ro /dev/shm && exec "$@"', "sh"]
is_mountable = subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft table model."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("target", "draft")):
        write_table_model(folder / name, 8, seed=seed)
    return folder


def redirected(how: str, command: list[str], **options: object) -> subprocess.Popen[bytes]:
    """The command, started by a shell with its standard streams redirected."""
    return subprocess.Popen(["sh", "-c", f'exec "$@" {how}', "sh", *command], **options)


def children_of(pid: int) -> dict[str, int]:
    """The services that `serve` has as processes, by name."""
    pids = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0") for pid in pids}
    return {own[4]: pid for pid, own in words.items() if "specdec.cli" in own}


@pytest.fixture(scope="module")
def serving(folders: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[bytes], Client, str]]]:
    """Starts `serve` with its streams redirected, once for each way; returns it, a client, and its address."""
    started: dict[str, tuple[subprocess.Popen[bytes], Client, str]] = {}

    def start(how: str) -> tuple[subprocess.Popen[bytes], Client, str]:
        if how in started:
            return started[how]
        port = free_port()
        address = f"127.0.0.1:{port}"
        models = ["--model", str(folders / "target"), "--draft-model", str(folders / "draft")]
        flags = ["--port", str(port), "--drain-grace-s", "1", *models]
        started[how] = redirected(how, [*SPECDEC, "serve", *flags]), Client(address), address
        return started[how]

    yield start
    for process, client, _ in started.values():
        client.close()
        process.terminate()
        process.wait(60)


def answers(process: subprocess.Popen[bytes], client: Client) -> bool:
    """Whether a text is generated; fails when the command has ended."""
    assert process.poll() is None, f"serve ended with {process.poll()}"
    try:
        return client.generate("<1>", max_tokens=5, ignore_eos=True).finished is not None
    except grpc.RpcError:
        return False


@pytest.mark.parametrize(
    "how",
    [CLOSED, pytest.param(">/dev/full 2>/dev/full", marks=pytest.mark.more)],
)
def test_serve_goes_on_without_standard_streams(serving: Callable, how: str) -> None:
    """Claim: `serve` serves where its standard streams are closed, and where they are full; a service that is lost is
    still reported, without a reader, and started again.

    Source: closed, it ended in silence; full, after two models were loaded. Conclusive: texts are generated before and
    after the draft is killed, by the same command, and a new draft takes its place; none of the processes has a socket
    or a pipe as a standard stream.
    """
    process, client, _ = serving(how)
    until(lambda: answers(process, client), timeout_s=120)
    first = children_of(process.pid)
    for pid in (process.pid, *first.values()):
        streams = {os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)}
        assert streams <= {"/dev/null", "/dev/full"}
    os.kill(first["draft"], signal.SIGKILL)
    until(lambda: children_of(process.pid).get("draft", first["draft"]) != first["draft"], timeout_s=60)
    assert answers(process, client)


def test_a_command_that_cannot_write_its_output_says_so(folders: Path, serving: Callable) -> None:
    """Claim: where the output is full, a command ends with code 1 and one line that says so; where its reader has gone,
    with code 1 and none. The services go on.

    Source: tracebacks of six lines and code 120. Conclusive: help, and a text that is streamed.
    """
    process, client, address = serving(CLOSED)
    until(lambda: answers(process, client), timeout_s=120)
    asked = [*SPECDEC, "generate", "<1>", "--max-tokens", "400", "--ignore-eos", "--address", address]
    for command in ([*SPECDEC, "--help"], asked):
        full = redirected(">/dev/full", command, stderr=subprocess.PIPE)
        _, errors = full.communicate(timeout=60)
        assert full.returncode == 1
        assert errors == b"specdec: the output cannot be written: No space left on device\n"
    reader = subprocess.Popen(["head", "-c", "1"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    left = subprocess.run(asked, stdout=reader.stdin, stderr=subprocess.PIPE, timeout=60)
    reader.stdin.close()
    reader.wait()
    assert (left.returncode, left.stderr) == (1, b"")
    assert answers(process, client)


@pytest.mark.parametrize(
    "variables",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["ascii", "C"],
)
def test_characters_that_a_terminal_lacks_are_replaced(variables: dict[str, str]) -> None:
    """Claim: output in an encoding without a character has a question mark for it.

    Source: UnicodeEncodeError in the midst of a text. Conclusive: a process of its own, whose locale is such a one.
    """
    program = "from specdec import streams; streams.prepare(); print('a\\u2502\\xfc'); streams.say('b\\u2502')"
    done = subprocess.run(
        python_command("-c", program), env=os.environ | variables, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("a??\nb?\n", "")


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_a_hung_process_is_ended_without_anyone_told(redirection: str) -> None:
    """Claim: the watch ends a hung process also where its reason cannot be written.

    Conclusive: the parent starts the watch's own program, writes nothing to it, and would live for a minute.
    """
    program = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
        f"watch = [sys.executable, '-I', '-S', {watch_program!r}, str(os.getpid()), '0.5']\n"
        "subprocess.Popen(watch, stdin=subprocess.PIPE)\n"
        "time.sleep(60)\n"
    )
    parent = redirected(redirection, python_command("-c", program))
    assert parent.wait(40) == -signal.SIGKILL


def test_a_user_without_a_home_folder_has_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Claim: without HOME and an entry in the list of users, or with a HOME that is no absolute path, a GGUF file,
    whose folder lies in the cache, is refused in a sentence.

    Conclusive: the function itself; the last lines show that it finds the folder where there is one.
    """
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "model.gguf"
    file.touch()
    for home, cache in ((None, None), ("", "odd"), ("home", None)):
        for name, value in (("HOME", home), ("XDG_CACHE_HOME", cache)):
            monkeypatch.delenv(name, raising=False)
            if value:
                monkeypatch.setenv(name, value)
        for name in (str(file), "~/model")[: 1 if home else 2]:
            with pytest.raises(ModelRefused, match="home"):
                local_folder(name)
    assert list(tmp_path.iterdir()) == [file]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "specdec"
    assert local_folder(str(file)).is_relative_to(cache_folder())


def ready_line(command: list[str], **options: object) -> str:
    """The first line of a service's output; then it is stopped."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    with process:
        line = process.stdout.readline()
        process.terminate()
        return line or process.communicate(timeout=60)[1]


@pytest.mark.more
@pytest.mark.skipif(not is_renumbered, reason="making a user namespace is not allowed here")
def test_a_numbered_user_serves(tmp_path: Path) -> None:
    """Claim: a user with a number only, without HOME, serves a model: containers have such users.

    Source: a traceback after 16 s. Conclusive: a namespace in which this user has another number, which is in no list,
    and a model of `transformers`.
    """
    model = make_tiny_model(tmp_path / "model", "llama")
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    command = [*SPECDEC, "target", "--model", str(model), "--port", "0", "--threads", "1"]
    line = ready_line([*RENUMBER, *command], env=environment)
    assert line.startswith("target serves on"), line


@pytest.mark.more
@pytest.mark.skipif(not is_mountable, reason="making a mount namespace is not allowed here")
def test_ranks_meet_where_shared_memory_cannot_be_written(tmp_path: Path) -> None:
    """Claim: ranks serve where /dev/shm is read-only, over loopback.

    Source: removing the file that could not be made ended rank 0. Conclusive: a mount namespace in which it is so.
    """
    model = make_tiny_model(tmp_path / "model", "llama")
    command = [*SPECDEC, "target", "--model", str(model), "--port", "0", "--threads", "1", "-tp", "2"]
    line = ready_line([*UNSHARE, *command])
    assert line.startswith("target serves on"), line


@pytest.mark.more
def test_a_service_starts_in_a_deleted_folder(tmp_path: Path) -> None:
    """Claim: a working folder that is gone does not matter: a library ended the process where it could not name it.

    Conclusive: the model needs that library, and the shell removes the folder that it is in before it starts the
    command.
    """
    model = make_tiny_model(tmp_path / "model", "llama")
    (tmp_path / "gone").mkdir()
    command = [*SPECDEC, "target", "--model", str(model), "--port", "0", "--threads", "1"]
    line = ready_line(["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", *command], cwd=tmp_path / "gone")
    assert line.startswith("target serves on"), line
