"""Choices of one request whose target is lost: each goes on at another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.engine.table_model import write_table_model
from tests.support.fleet_services import running_fleet
from tests.support.services import Outcome

TOKENS, COUNT = 3000, 3


@pytest.mark.more
def test_choices_outlive_their_target(tmp_path: Path) -> None:
    """Claim: when the target of three choices is killed in their midst each goes on at another one by itself: no error,
    and every choice is its single request.

    Conclusive: the first target is the only member until all three are under way there, and each says that it changed
    targets; the singles are made by the second one.
    """
    write_table_model(tmp_path / "model", 7, TOKENS + 100, seed=1)
    asked: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "speculative": {"enabled": False}}
    own = {"insecure_links": True}  # the files may name any machine
    with running_fleet(
        tmp_path, tmp_path / "model", tmp_path / "model", (1, 1, 1), {"threads": 1}, None, own
    ) as services:
        (client,) = services.clients
        first, second = services.targets[0], services.begin_target()
        second.wait_ready()
        found = [Outcome() for _ in range(COUNT)]
        call = client.stub.Generate(client.request([1, 2], n=COUNT, seed=9, **asked), timeout=300)
        while min(len(own.token_ids) for own in found) < 20:
            response = next(call)
            client.take(found[response.choice], response)
        services.list_members()
        services.wait_for(client, 2, 1)
        services.kill(first)
        for response in call:
            client.take(found[response.choice], response)
        requests = [{"prompt": [1, 2], "seed": 9 + index, **asked} for index in range(COUNT)]
        for own, single in zip(found, client.generate_all(requests, COUNT)):
            assert own.finished.statistics.num_target_changes == 1 and not own.moved
            assert own.comparable == single.comparable
