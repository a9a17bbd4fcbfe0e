"""The three services under mutual TLS, with `specdec generate` as the client: every connection is encrypted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from specdec.config import TargetSettings
from specdec.errors import PeerRefused
from specdec.launch.children import arguments_of, start
from specdec.rpc.client import call_unary, open_channel, wait_serving
from specdec.v1 import types_pb2 as types_pb
from tests.support.certificates import Authority
from tests.support.harness import running
from tests.support.pages import free_address, read_page

# The fixed policy waits for its draft tokens; the automatic one may find that models of tables are not worth it.
ASKED = ("<1><2>", "--seed", "3", "--max-tokens", "400", "--ignore-eos", "--policy", "fixed")


def specdec_generate(address: str, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "specdec.cli", "generate", *ASKED, "--address", address, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.more
def test_all_three_services_and_the_client_speak_mutual_tls(table_models: tuple[Path, Path], tmp_path: Path):
    """Claim: with certificates of one authority, whose name the replicas allow, a draft is used and the text is the
    plain one's; without, each of the three ports refuses. Conclusive: the text equals that of services without TLS,
    and refusals are real handshakes."""
    authority = Authority("specdec tests")
    tls = authority.issue(tmp_path / "services")
    mine = arguments_of(authority.issue(tmp_path / "client"))
    settings = tls.model_dump(exclude={"insecure"})
    replicas = {**settings, "threads": 1, "allow_peer": ("specdec test",)}
    with running(*table_models, coordinator={**settings, "draft_wait_ms": 2000.0}, **replicas) as services:
        specdec_generate(services.coordinator.address, *mine)  # a draft's first step may be late
        answered = specdec_generate(services.coordinator.address, *mine, "--json")
        assert answered.returncode == 0, answered.stderr
        assert '"num_draft_tokens"' in answered.stdout
        text = specdec_generate(services.coordinator.address, *mine).stdout
        assert specdec_generate(services.coordinator.address).returncode == 1
        for child in (services.target, services.draft, services.coordinator):
            with grpc.insecure_channel(child.address) as channel, pytest.raises(grpc.RpcError):
                channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)
    with running(*table_models, threads=1) as plain:
        assert specdec_generate(plain.coordinator.address).stdout == text != ""


async def test_a_replica_answers_allowed_peers_only(table_models: tuple[Path, Path], tmp_path: Path):
    """Claim: a target with --allow-peer describes itself to the coordinator of that name and to no other of its
    authority; its health and its page answer as without. Conclusive: a real process and handshakes."""
    authority, page = Authority("specdec tests"), free_address()
    files = authority.issue(tmp_path / "target").model_dump(exclude={"insecure"})
    common = {"port": 0, "threads": 1, "log_level": "error", "metrics_address": page}
    settings = TargetSettings(model=str(table_models[0]), allow_peer=("coordinator-1",), **common, **files)
    asked = "/specdec.v1.TargetService/Describe", types_pb.DescribeRequest(), types_pb.DescribeResponse, 5.0
    with start("target", settings) as child:
        address = child.wait_ready()
        for name in ("coordinator-1", "coordinator-2"):
            async with open_channel(address, authority.issue(tmp_path / name, common_name=name)) as channel:
                await wait_serving(channel, "specdec.v1.TargetService", 5.0)
                if name == "coordinator-1":
                    assert (await call_unary(channel, *asked)).vocabulary_size == 7
                    continue
                with pytest.raises(PeerRefused, match=name):
                    await call_unary(channel, *asked)
        assert read_page(page).value("specdec_serving") == 1
