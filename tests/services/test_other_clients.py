"""The commands of docs/operations.md for clients that are not ours, where these are installed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.services import MODELS, running

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
# The answer of each tool: a text that ended, and as many good calls as were asked for.
ANSWERS = {"grpcurl": r'"reason": "FINISH_REASON_LENGTH"', "ghz": r"\[OK\]\s+64 responses"}


def command_of(tool: str) -> list[str]:
    """The words of the page's command for a tool."""
    page = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(rf"^{tool} .*$", page, re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize("tool", ANSWERS)
def test_the_page_has_a_command_for_each(tool: str):
    """Claim: the page has one command for the tool, to the default address, without a proto file."""
    words = command_of(tool)
    assert "localhost:50051" in words and "specdec.v1.CoordinatorService/Generate" in words
    assert not any("proto" in word for word in words)


@pytest.mark.parametrize("tool", ANSWERS)
def test_other_clients_work_without_proto_files(tool: str):
    """Claim: the page's command gets texts from a running service, whose methods it finds by reflection."""
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    with running(MODELS / "target", None, threads=1) as services:
        address = services.coordinator.address
        words = [address if word == "localhost:50051" else word for word in command_of(tool)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(ANSWERS[tool], done.stdout), done.stdout
