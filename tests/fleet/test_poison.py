"""A request that kills every target that runs it, among texts that do not."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.config import CoordinatorSettings
from specdec.engine.table_model import write_table_model
from specdec.launch.children import start
from tests.chaos.fleets import Stream, wait_under_way
from tests.chaos.processes import Link
from tests.support.poisoned_target import POISON
from tests.support.services import Client
from tests.support.waiting import until

TARGET_COUNT = 5
WIDTH = 20
DELAY_MS = 10.0
ASKED: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "speculative": {"enabled": False}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table model that never chooses POISON."""
    folder, size = tmp_path_factory.mktemp("poison") / "model", POISON + 1
    logits = torch.randn(size + 1, size + 1, size, generator=torch.Generator().manual_seed(1))
    logits[..., POISON] = -1e9
    write_table_model(folder, size, logits=logits)
    return folder


@contextmanager
def targets_of(model: Path) -> Iterator[tuple[list[subprocess.Popen[str]], list[str]]]:
    """Running targets, and the address of the link to each."""
    flags = ["--model", str(model), "--port", "0", "--threads", "1", "--device", "cpu", "--log-level", "error"]
    command = [sys.executable, "-m", "tests.support.poisoned_target", *flags]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(TARGET_COUNT)]
    links: list[Link] = []
    try:
        for process in processes:
            links.append(Link(process.stdout.readline().split()[-1], DELAY_MS))
        yield processes, [link.address for link in links]
    finally:
        for link in links:
            link.stop()
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.more
def test_a_request_that_kills_its_targets_ends_alone(model: Path) -> None:
    """Claim: of five targets a request that kills each that runs it ends three, then itself, UNAVAILABLE; all texts
    that were under way at these targets come out as undisturbed.

    Conclusive: the request kills by its prompt, at once, wherever it is opened; the texts at the targets of its second
    and third try lose several in a row and must be told from it. Two targets are left running.
    """
    with targets_of(model) as (processes, addresses):
        settings = CoordinatorSettings(
            target=tuple(addresses), tokenizer=str(model), port=0, log_level="error", drain_grace_s=1.0
        )
        with start("coordinator", settings) as child:
            client = Client(child.wait_ready())
            until(lambda: sum(group.num_replicas for group in client.described().targets) == TARGET_COUNT)
            expected = [client.generate(**asked_of(seed)).comparable for seed in range(WIDTH)]
            streams = [Stream(client, client.request(**asked_of(seed))) for seed in range(WIDTH)]
            wait_under_way(streams, 10)
            poison = Stream(client, client.request([1, POISON, 1], **ASKED)).join()
            assert poison.error is not None and poison.error.code().name == "UNAVAILABLE"
            assert not poison.outcome.token_ids
            assert [stream.join().error for stream in streams] == [None] * WIDTH
            assert [stream.outcome.comparable for stream in streams] == expected
            time.sleep(1.0)
            assert sum(process.poll() is not None for process in processes) == 3
            client.close()


def asked_of(seed: int) -> dict[str, Any]:
    """The arguments of one text."""
    return {"prompt": [1 + seed % 3, 2], **ASKED, "temperature": float(seed % 2), "seed": seed}
