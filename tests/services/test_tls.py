"""The three services under mutual TLS, with `specdec generate` as the client: every connection is encrypted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from bench.harness import running
from specdec.launch.children import arguments_of
from tests.support.certificates import Authority

# The fixed policy waits for its draft tokens; the automatic one may find that models of tables are not worth it.
ASKED = ("<1><2>", "--seed", "3", "--max-tokens", "400", "--ignore-eos", "--policy", "fixed")


def specdec_generate(address: str, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "specdec.cli", "generate", *ASKED, "--address", address, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.more
def test_all_three_services_and_the_client_speak_mutual_tls(table_models: tuple[Path, Path], tmp_path: Path):
    """Claim: with certificates of one authority a draft is used and the text is the plain one's; without, each of the
    three ports refuses. Conclusive: the text equals that of services without TLS, and refusals are real handshakes."""
    authority = Authority("specdec tests")
    tls = authority.issue(tmp_path / "services")
    mine = arguments_of(authority.issue(tmp_path / "client"))
    settings = tls.model_dump(exclude={"insecure"})
    with running(*table_models, coordinator={**settings, "draft_wait_ms": 2000.0}, threads=1, **settings) as services:
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
