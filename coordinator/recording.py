"""Texts that were generated, kept for `specdec distill --from-record`: token ids and what became of draft tokens.

Off unless asked for. One JSON object a line; a thread of its own writes, so the event loop never waits for a disk.
"""

from __future__ import annotations

import json
import os
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
    that cannot be opened."""

    def __init__(self, file: Path, bytes_max: int) -> None:
        try:
            self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"--record {file} cannot be opened: {error.strerror}") from None
        self._left = bytes_max - os.fstat(self._descriptor).st_size
        self._writer = BackgroundWriter(self._descriptor, "recorder", WAITING_BYTES_MAX, failed=_report_failure)

    def add(self, prompt_ids: Sequence[int], temperature: float, deltas: Sequence[Delta]) -> None:
        """Appends one text; nothing if the file is full or the disk too slow."""
        output_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        line = {
            "prompt_ids": list(prompt_ids),
            "output_ids": output_ids,
            "accepted": "".join(RECORD_SIGNS[kind] for delta in deltas for kind in delta.kinds),
            "temperature": temperature,
        }
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if len(data) > self._left:
            get_logger().warning("text not recorded", reason="full")
        elif self._writer.put(data):
            self._left -= len(data)
        else:
            get_logger().warning("text not recorded", reason="the disk is slow")

    def close(self) -> None:
        """Writes what waits, within CLOSE_TIMEOUT_S; the rest is lost. Blocks."""
        if self._writer.flush(CLOSE_TIMEOUT_S):
            os.close(self._descriptor)


def _report_failure(error: OSError) -> None:
    get_logger().error("text not recorded", reason=error.strerror)
