"""The shared fixture of the deployment tests: a folder with the files of secrets."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the keys of all secrets that services mount; the command only checks that they are files."""
    folder = tmp_path_factory.mktemp("secrets")
    for name in ("tls.crt", "tls.key", "ca.crt", "keys"):
        (folder / name).touch()
    return folder
