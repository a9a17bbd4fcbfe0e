"""Keys of clients: a file of names and SHA-256 hashes, one pair a line, read again when it changes.

A key has 256 random bits, so its plain hash cannot be guessed, and the time of a look-up in a table of hashes says
nothing of the key.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from pathlib import Path

from specdec.errors import ConfigError
from specdec.telemetry.logs import get_logger

KEY_BYTES = 32
PREFIX = "sk-specdec-"
LOOK_S = 1.0  # between looks at the file
NAME = re.compile(r"[\w.@-]{1,64}")
HASH = re.compile(r"[0-9a-f]{64}")


def hash_of(key: str) -> str:
    """Returns the hash of a key as it stands in the file."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key(name: str) -> tuple[str, str]:
    """Returns a new key and its line for the file. Raises ConfigError for a name that cannot stand there."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"--new-key is {name!r:.80}; it must be 1 to 64 letters, digits, or . _ @ -")
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    return key, f"{name} {hash_of(key)}"


def read_keys(file: Path) -> dict[str, str]:
    """Returns the names by hash. Raises ConfigError, with the line, for a file that is not of this form."""
    names: dict[str, str] = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-keys-file {file} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not NAME.fullmatch(words[0]) or not HASH.fullmatch(words[1]):
            raise ConfigError(
                f"--api-keys-file {file}, line {number}: it must be NAME and a SHA-256 hash in hexadecimal"
            )
        names[words[1]] = words[0]
    return names


class Keys:
    """The keys of a file. Making it raises ConfigError; a later file that cannot be read is logged, and keys stay."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._names = read_keys(file)
        self._version = self._look()
        self._next_s = time.monotonic() + LOOK_S

    def name_of(self, key: str) -> str | None:
        """Returns the name of a key; None if it is not in the file."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LOOK_S
            self._read_again()
        return self._names.get(hash_of(key))

    def _look(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self._file)
        except OSError:
            return (0, 0, 0)
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read_again(self) -> None:
        version = self._look()
        if version == self._version:
            return
        self._version = version
        try:
            self._names = read_keys(self._file)
        except ConfigError as error:
            get_logger().warning("keys not read", error=str(error))
