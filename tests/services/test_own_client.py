"""`specdec generate` whose coordinator dies under it, on real services."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.config import split_address
from specdec.engine.table_model import write_table_model
from specdec.launch.children import start
from tests.support.services import Client, running

TOKENS = 1500  # it lasts until the coordinator is killed, on any machine


@pytest.mark.more
def test_a_text_outlives_its_coordinator(tmp_path: Path) -> None:
    """Claim: a text whose coordinator is killed and started again on its port goes on by itself: one start, every token
    once, one end, and with the seed in force it is, byte for byte, the text of a coordinator that lived. With
    `--resume-s 0` the loss is the command's error.

    Conclusive: the coordinator is ended by SIGKILL while tokens arrive, and the undisturbed text is made by the
    other one, without speculation.
    """
    write_table_model(tmp_path / "model", 7, TOKENS + 100)
    with running(tmp_path / "model", None, threads=1) as services:
        killed = services.coordinator
        command = [sys.executable, "-m", "specdec.cli", "generate", "<1><2>", "--json", "--address", killed.address]
        command += ["--max-tokens", str(TOKENS), "--ignore-eos"]
        other_command = [*command, "--resume-s", "0"]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as own,
            subprocess.Popen(other_command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as other,
        ):
            assert own.stdout and other.stdout
            read = [own.stdout.readline() for _ in range(20)]
            other.stdout.readline()
            killed.process.kill()
            killed.stop(0.0)
            settings = services.settings.model_copy(update={"port": split_address(killed.address)[1]})
            with start("coordinator", settings) as again:
                messages = [json.loads(line) for line in (*read, *own.stdout)]
                error = other.communicate()[1]
                own.wait()
                client = Client(again.wait_ready())
                sampling = {"ignore_eos": True, "max_tokens": TOKENS, "seed": int(messages[0]["started"]["seed"])}
                whole = client.generate("<1><2>", speculative={"enabled": False}, **sampling)
                client.close()
    assert own.returncode == 0 and other.returncode == 1 and len(error.splitlines()) == 1, error
    assert list(messages[0]) == ["started"] and list(messages[-1]) == ["finished"]
    deltas = [message["delta"] for message in messages[1:-1]]
    token_ids = [token_id for delta in deltas for token_id in delta["token_ids"]]
    firsts = [delta.get("first_output_index", 0) for delta in deltas]
    assert firsts == [sum(len(delta["token_ids"]) for delta in deltas[:index]) for index in range(len(deltas))]
    assert token_ids == whole.token_ids and "".join(delta.get("text", "") for delta in deltas) == whole.text
    assert messages[-1]["finished"]["usage"]["output_tokens"] == TOKENS
