"""`specdec coordinator --record`: what is kept of generations, and what is not."""

from __future__ import annotations

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
from tests.support.services import fixed, running

KINDS = {1: "1", 2: "0", 3: "-"}  # of the wire


def test_tokens_and_acceptances_are_kept_and_no_text(table_models: tuple[Path, Path], tmp_path: Path) -> None:
    """Claim: each generation is one line: its prompt's and output's token ids, what became of each draft token, and
    its temperature, as the client saw them; a resumed one continues after the tokens it was given. Nothing else is in
    the file, which its owner alone may read."""
    file = tmp_path / "record.jsonl"
    with running(*table_models, {"record": file, "record_notice": True}) as services:
        client = services.client
        told = {"max_tokens": 200, "temperature": 0.7, "seed": 5, "ignore_eos": True, "speculative": fixed(3)}
        whole = client.generate([1, 2, 3], **told)
        resumed = client.generate([1, 2, 3], **told, resume=whole.token_ids[:7])
        services.coordinator.stop()
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


def test_a_file_is_bounded_and_errors_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: a text beyond the limit is left out and the file stays whole lines; a limit counts what was there; a path
    that cannot be opened is named."""
    delta = Delta(0, (5, 6), (TokenKind.ACCEPTED, TokenKind.BONUS), "", (0, 0))
    file = tmp_path / "record.jsonl"
    for _ in range(2):
        recorder = Recorder(file, 200)
        for _ in range(3):
            recorder.add([1, 2], 0.0, [delta])
        recorder.close()
    lines = file.read_text().splitlines()
    assert lines == ['{"prompt_ids":[1,2],"output_ids":[5,6],"accepted":"1-","temperature":0.0}'] * 2
    with pytest.raises(ConfigError, match="cannot be opened: Is a directory"):
        Recorder(tmp_path, 200)


def test_a_disk_that_hangs_delays_no_end(tmp_path: Path) -> None:
    """Claim: while nothing is written, texts are left out beyond a bound and the recorder and its process end in time.
    Conclusive: a pipe that is never read takes the place of the file, so the first write that does not fit it hangs."""
    file = tmp_path / "record.jsonl"
    os.mkfifo(file)
    unread = os.open(file, os.O_RDWR | os.O_NONBLOCK)
    script = (
        "import sys; from pathlib import Path; from specdec.coordinator.recording import Recorder; "
        "recorder = Recorder(Path(sys.argv[1]), 1 << 30); "
        "[recorder.add(range(100_000), 0.0, []) for _ in range(50)]; recorder.close()"
    )
    command = [sys.executable, "-c", script, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    os.close(unread)
    assert done.returncode == 0 and "the disk is slow" in done.stdout, done.stderr
