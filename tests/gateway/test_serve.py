"""`specdec serve --http-port`: the gateway beside the services, started, kept and stopped with them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.cli.serve import http_sentence
from specdec.config import ServeSettings
from specdec.engine.table_model import write_table_model
from specdec.gateway_settings import GatewaySettings, beside
from specdec.launch.children import arguments_of
from tests.support.gateways import ask
from tests.support.waiting import until


def child_of(parent: int, command: str) -> int | None:
    """The process with this command among the children of another."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status = (folder / "status").read_text()
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"PPid:\t{parent}\n" in status and command.encode() in words:
                return int(folder.name)
    return None


def answers(address: str) -> bool:
    """Whether the gateway is healthy."""
    try:
        return ask(address, "/health").status == 200
    except OSError:
        return False


@pytest.mark.lengthy
def test_serve_starts_and_keeps_the_gateway(tmp_path: Path) -> None:
    """Claim: `specdec serve --http-port 0` prints the base URL and a command that works; a gateway that is killed is
    back on its port; Ctrl-C stops all with code 0. Conclusive: the process is ended by SIGKILL, and another answers."""
    write_table_model(tmp_path / "model", 7, 512)
    command = [
        sys.executable,
        "-m",
        "specdec.cli",
        "serve",
        "--model",
        str(tmp_path / "model"),
        "--draft-model",
        "none",
    ]
    command += ["--port", "0", "--http-port", "0", "--threads", "1", "--served-model-name", "seven"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serve:
        try:
            assert serve.stdout is not None
            lines = [serve.stdout.readline() for _ in range(4)]
            address = re.search(r"base URL http://(127\.0\.0\.1:\d+)/v1", "".join(lines))
            assert address is not None, lines
            assert lines[2] + lines[3] == http_sentence(address[1]) + "\n"
            body = {"model": "seven", "prompt": "<1>", "max_tokens": 3}
            assert ask(address[1], "/v1/completions", body).status == 200
            if shutil.which("curl"):
                tried = subprocess.run(shlex.split(lines[3]), capture_output=True, text=True, check=True).stdout
                assert json.loads(tried)["choices"][0]["finish_reason"] in ("stop", "length"), tried
            first = child_of(serve.pid, "gateway")
            assert first is not None
            os.kill(first, signal.SIGKILL)
            until(lambda: child_of(serve.pid, "gateway") not in (None, first))
            until(lambda: answers(address[1]))
            assert ask(address[1], "/v1/completions", body).status == 200
        finally:
            serve.send_signal(signal.SIGINT)
            serve.communicate(timeout=60)
    assert serve.returncode == 0


def test_settings_beside_serve() -> None:
    """Claim: the gateway of `serve` listens on its host and --http-port with its keys; beyond loopback it needs keys
    or --insecure, as the command itself does; the flags of the child give these settings again."""
    own = beside(ServeSettings(http_port=81, served_model_name="x"), "127.0.0.1:5")
    assert (own.host, own.port, own.address, own.served_model_name) == ("127.0.0.1", 81, ("127.0.0.1:5",), "x")
    several = GatewaySettings(address=("127.0.0.1:5", "127.0.0.1:6"))
    assert arguments_of(several).count("--address=127.0.0.1:6") == 1
    for made, more in ((ServeSettings, {"http_port": 1}), (GatewaySettings, {})):
        with pytest.raises(ValueError, match="--api-keys-file"):
            made(host="0.0.0.0", ssl_certfile=__file__, ssl_keyfile=__file__, ssl_ca_certs=__file__, **more)
        assert made(host="0.0.0.0", insecure=True, **more).insecure
