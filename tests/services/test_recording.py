"""`specdec coordinator --record`: what is kept of generations, and what is not."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.coordinator.recording import Recorder
from specdec.errors import ConfigError
from specdec.protocol.report import Delta
from specdec.protocol.types import TokenKind
from tests.support.services import Services, fixed

KINDS = {1: "1", 2: "0", 3: "-"}  # of the wire


def test_tokens_and_acceptances_are_kept_and_no_text(table_services: Services, tmp_path: Path) -> None:
    """Claim: each generation is one line: its prompt's and output's token ids, what became of each draft token, and
    its temperature, as the client saw them; a resumed one continues after the tokens it was given. Nothing else is in
    the file, which its owner alone may read."""
    file = tmp_path / "record.jsonl"
    with table_services.coordinator_with(record=file, record_notice=True) as client:
        told = {"max_tokens": 400, "temperature": 0.7, "seed": 5, "ignore_eos": True, "speculative": fixed(3)}
        whole = client.generate([1, 2, 3], **told)
        resumed = client.generate([1, 2, 3], **told, resume=whole.token_ids[:7])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [list(line) for line in lines] == [["prompt_ids", "output_ids", "accepted", "temperature"]] * 2
    assert lines[0]["prompt_ids"] == [1, 2, 3] and lines[0]["output_ids"] == whole.token_ids
    assert lines[0]["accepted"] == "".join(KINDS[kind] for kind in whole.kinds) and "1" in lines[0]["accepted"]
    assert lines[1]["prompt_ids"] == [1, 2, 3, *whole.token_ids[:7]]
    assert lines[1]["output_ids"] == resumed.token_ids and lines[1]["temperature"] == 0.7
    assert file.stat().st_mode & 0o777 == 0o600


def test_it_is_refused_without_notice(table_models: tuple[Path, Path], tmp_path: Path) -> None:
    """Claim: the flag alone is refused in one line before anything is started, and no file is made."""
    file = tmp_path / "record.jsonl"
    flags = ["--target", "127.0.0.1:1", "--tokenizer", str(table_models[0]), "--record", str(file)]
    command = [sys.executable, "-m", "specdec.cli", "coordinator", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "--record-notice" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not file.exists()


LINE = '{"prompt_ids":[1,2],"output_ids":[5,6],"accepted":"1-","temperature":0.0}\n'


def record_texts(file: Path, count: int, bytes_max: int = 1 << 20) -> None:
    """Records a text, whose line is LINE, `count` times."""
    delta = Delta(0, (5, 6), (TokenKind.ACCEPTED, TokenKind.BONUS), "", (0, 0))
    recorder = Recorder(file, bytes_max)
    for _ in range(count):
        recorder.add([1, 2], 0.0, [delta])
    recorder.close()


def test_a_file_is_bounded_and_errors_are_named(tmp_path: Path) -> None:
    """Claim: a text beyond the limit is left out and the file stays whole lines; a limit counts what was there; a path
    that cannot be opened is named."""
    file = tmp_path / "record.jsonl"
    for _ in range(2):
        record_texts(file, 3, 200)
    assert file.read_text() == LINE * 2
    for _ in range(2):
        record_texts(file, 3, 5 * len(LINE))
    assert file.read_text() == LINE * 5
    with pytest.raises(ConfigError, match="cannot be opened: Is a directory"):
        Recorder(tmp_path, 200)


def test_the_length_of_an_encoders_input_is_kept(tmp_path: Path) -> None:
    """Claim: of a text with an encoder's input the line says how many of the prompt's tokens it is."""
    recorder = Recorder(tmp_path / "record.jsonl", 200)
    recorder.add([1, 2], 0.0, [Delta(0, (5,), (TokenKind.BONUS,), "", (0,))], encoder_length=1)
    recorder.close()
    assert json.loads((tmp_path / "record.jsonl").read_text())["encoder_length"] == 1


FILL = """
import resource, sys
from pathlib import Path
from tests.services.test_recording import record_texts
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
record_texts(Path(sys.argv[1]), 3)
"""


@pytest.mark.parametrize("space", [0, len(LINE) - 1, len(LINE) + 1, 3 * len(LINE) - 1])
def test_a_full_disk_costs_whole_lines(tmp_path: Path, space: int) -> None:
    """Claim: where the disk takes a part of a line, nothing of it stays, so that the lines before it, and those that
    are written once there is space, are whole. Conclusive: the kernel itself writes a part and then refuses, at a limit
    for the size of files; without one all lines come."""
    file = tmp_path / "record.jsonl"
    file.write_text(LINE)
    subprocess.run([sys.executable, "-c", FILL, str(file), str(len(LINE) + space)], check=True)
    assert file.read_text() == LINE * (1 + space // len(LINE))
    record_texts(file, 2)
    assert file.read_text() == LINE * (3 + space // len(LINE))


def test_a_cut_line_spoils_no_other(tmp_path: Path) -> None:
    """Claim: what a coordinator that was killed left of a line gets an end of its own, within the limit of the file."""
    file = tmp_path / "record.jsonl"
    file.write_text(LINE + LINE[:20])
    record_texts(file, 1, 2 * len(LINE) + 20)
    assert file.read_text() == LINE + LINE[:20], "the end of the line would be a byte too many"
    record_texts(file, 1)
    assert file.read_text() == LINE + LINE[:20] + "\n" + LINE


@pytest.mark.parametrize("mode", [0o666, 0o644, 0o640, 0o604, 0o777])
def test_a_file_that_was_there_becomes_private(tmp_path: Path, mode: int) -> None:
    """Claim: whatever its mode was, only its owner can read or change what is recorded."""
    file = tmp_path / "record.jsonl"
    file.write_text(LINE)
    file.chmod(mode)
    record_texts(file, 1)
    assert file.stat().st_mode & 0o777 == 0o600 and file.read_text() == 2 * LINE


def test_only_a_regular_file_of_this_user_is_written(tmp_path: Path) -> None:
    """Claim: a link, to a file or to nothing, a pipe without a reader and a device are refused at once by name, with
    nothing written, made or changed; a folder may be a link."""
    target, link, dangling, pipe = (tmp_path / name for name in ("target", "link", "dangling", "pipe"))
    target.write_text("kept")
    target.chmod(0o644)
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "absent")
    os.mkfifo(pipe)
    for file, reason in (
        (link, "it is a symbolic link"),
        (dangling, "it is a symbolic link"),
        (pipe, "is no regular file"),
        (Path("/dev/null"), "is no regular file"),
    ):
        with pytest.raises(ConfigError, match=f"--record {file}.*{reason}"):
            Recorder(file, 200)
    assert target.read_text() == "kept" and target.stat().st_mode & 0o777 == 0o644
    assert not (tmp_path / "absent").exists() and Path("/dev/null").stat().st_mode & 0o777 == 0o666
    (tmp_path / "folder").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "folder")
    record_texts(tmp_path / "other" / "record.jsonl", 1)
    assert (tmp_path / "folder" / "record.jsonl").read_text() == LINE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    """Claim: a file that another user owns, and could read whatever its mode, is refused and keeps its mode."""
    file = tmp_path / "record.jsonl"
    file.write_text(LINE)
    os.chown(file, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        Recorder(file, 1 << 20)
    assert file.read_text() == LINE and file.stat().st_mode & 0o777 == 0o644


def test_two_coordinators_keep_lines_whole(tmp_path: Path) -> None:
    """Claim: while one coordinator replaces another on the same file, lines of both are whole, and the limit is of
    both together."""
    file = tmp_path / "record.jsonl"
    own = [
        subprocess.Popen(
            [sys.executable, "-c", FILL.replace("3)", f"200, {300 * len(LINE)})"), str(file), str(1 << 30)],
            stderr=subprocess.DEVNULL,
        )
        for _ in range(2)
    ]
    assert [process.wait(60) for process in own] == [0, 0]
    assert file.read_text() == LINE * 300


def test_a_disk_that_hangs_delays_no_end(tmp_path: Path) -> None:
    """Claim: while nothing is written, texts are left out beyond a bound and the recorder and its process end in time.
    Conclusive: another process holds the lock of the file, so the first write waits without end."""
    file = tmp_path / "record.jsonl"
    script = (
        "import sys; from pathlib import Path; from specdec.coordinator.recording import Recorder; "
        "recorder = Recorder(Path(sys.argv[1]), 1 << 30); "
        "[recorder.add(range(100_000), 0.0, []) for _ in range(50)]; recorder.close()"
    )
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        command = [sys.executable, "-c", script, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "the disk is slow" in done.stdout and file.stat().st_size == 0, done.stderr
