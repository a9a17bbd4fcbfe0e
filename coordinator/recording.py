"""Texts that were generated, kept for `specdec distill --from-record`: token ids and what became of draft tokens.

Off unless asked for. One JSON object a line, whole or not at all; a thread of its own writes, so the event loop never
waits for a disk.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from specdec.errors import ConfigError
from specdec.protocol.report import Delta
from specdec.protocol.types import RECORD_SIGNS
from specdec.telemetry.background_writer import BackgroundWriter
from specdec.telemetry.logs import get_logger

WAITING_BYTES_MAX = 16 << 20  # some thousand texts not written yet; further ones are left out
CLOSE_TIMEOUT_S = 2.0  # for what waits: a stopping service does not wait for a disk that hangs


class Recorder:
    """Appends texts to a file of at most `bytes_max` bytes, readable by its owner only. Raises ConfigError for a file
    that cannot be opened, and for any but a regular file of this user: no text goes through a link to elsewhere."""

    def __init__(self, file: Path, bytes_max: int) -> None:
        self._descriptor = open_private(file)
        self._bytes_max = bytes_max
        self._writer = BackgroundWriter(
            self._descriptor, "recorder", WAITING_BYTES_MAX, failed=_report_failure, write=self._write
        )

    def add(
        self, prompt_ids: Sequence[int], temperature: float, deltas: Sequence[Delta], encoder_length: int = 0
    ) -> None:
        """Appends one text; nothing if the file is full or the disk too slow. `encoder_length`: of `prompt_ids`, those
        that are an encoder's input."""
        output_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        line = {
            "prompt_ids": list(prompt_ids),
            "output_ids": output_ids,
            "accepted": "".join(RECORD_SIGNS[kind] for delta in deltas for kind in delta.kinds),
            "temperature": temperature,
        }
        if encoder_length:
            line["encoder_length"] = encoder_length
        if not self._writer.put(json.dumps(line, separators=(",", ":")).encode() + b"\n"):
            get_logger().warning("text not recorded", reason="the disk is slow")

    def _write(self, line: bytes) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # of a coordinator that replaces this one
        try:
            if not append_whole(self._descriptor, line, self._bytes_max):
                get_logger().warning("text not recorded", reason="full")
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Writes what waits, within CLOSE_TIMEOUT_S; the rest is lost. Blocks."""
        if self._writer.flush(CLOSE_TIMEOUT_S):
            os.close(self._descriptor)


def _report_failure(error: OSError) -> None:
    get_logger().error("text not recorded", reason=error.strerror)


def open_private(file: Path) -> int:
    """Returns a descriptor to read and append to a regular file of this user that no other may read. Raises
    ConfigError."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe must not wait for its reader
    try:
        descriptor = os.open(file, flags, 0o600)
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP and file.is_symlink() else error.strerror
        raise ConfigError(f"--record {file} cannot be opened: {reason}") from None
    found = os.fstat(descriptor)
    try:
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"--record {file} is no regular file")
        if found.st_uid != os.geteuid():
            raise ConfigError(f"--record {file} belongs to another user, who could read it")
        os.fchmod(descriptor, 0o600)
    except (ConfigError, OSError) as error:
        os.close(descriptor)
        raise error if isinstance(error, ConfigError) else ConfigError(f"--record {file}: {error.strerror}") from None
    return descriptor


def append_whole(descriptor: int, line: bytes, bytes_max: int) -> bool:
    """Appends a line, or leaves the file as it was: returns False if it would have more than `bytes_max` bytes, raises
    OSError if the disk does not take it. A line that someone's end cut is ended first."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        line = b"\n" + line
    if size + len(line) > bytes_max:
        return False
    try:
        while line:  # a disk that fills takes a part, and then fails
            line = line[os.write(descriptor, line) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise
    return True
