"""A target that lives, steps and answers pings, but never answers one verification: real processes and sockets."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.planted_client import PlantedTarget
from tests.support.planted_target import LOST, PLAIN
from tests.support.services import Client

QUIET_S = 2.0  # in place of a minute
COORDINATOR = f"""
from specdec.coordinator import deadlines
deadlines.QUIET_S = {QUIET_S}
from specdec.cli.main import main
main("coordinator")
"""


@pytest.fixture
def client(table_models: tuple[Path, Path], tmp_path: Path) -> Iterator[Client]:
    """A client of a coordinator with a short bound, and with a planted target."""
    target = PlantedTarget(table_models[0], tmp_path / "log")
    flags = ["--target", target.address, "--tokenizer", str(table_models[0]), "--port", "0", "--log-level", "error"]
    coordinator = subprocess.Popen([sys.executable, "-c", COORDINATOR, *flags], stdout=subprocess.PIPE, text=True)
    client = Client(coordinator.stdout.readline().split()[-1])
    yield client
    client.close()
    coordinator.kill()
    coordinator.wait()
    coordinator.stdout.close()
    target.stop()


@pytest.mark.more
def test_a_verification_without_answer_ends_its_generation_only(client: Client) -> None:
    """Claim: a generation whose verification is never answered ends UNAVAILABLE with how to resume, after the bound and
    not before; the target, whose link stays up, serves the next request.

    Source: no generation may hang for ever. Conclusive: the link pings every second and would be lost after 3 s of
    silence with another message; the request before has the same shape and is answered.
    """
    deadline_s = time.monotonic() + 20
    while True:
        try:
            assert len(client.generate([PLAIN], max_tokens=1).token_ids) == 1
            break
        except grpc.RpcError as error:  # the link is not up yet
            assert error.code() is grpc.StatusCode.UNAVAILABLE and time.monotonic() < deadline_s
            time.sleep(0.05)
    began_s = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        client.generate([LOST], max_tokens=1, timeout_s=60)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and time.monotonic() - began_s >= QUIET_S
    assert "did not answer a verification" in caught.value.details()
    assert "resume.output_token_ids" in caught.value.details()
    assert len(client.generate([PLAIN], max_tokens=1).token_ids) == 1
