"""Choices of one request whose target is lost: each goes on at another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.engine.table_model import write_table_model
from tests.support.fleet_services import running_fleet
from tests.support.services import Outcome

TOKENS, COUNT = 1200, 3


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
        found = [Outcome() for _ in range(COUNT)]
        call = client.stub.Generate(client.request([1, 2], n=COUNT, seed=9, **asked), timeout=300)
        while min(len(own.token_ids) for own in found) < 20:
            response = next(call)
            client.take(found[response.choice], response)
        first, second = services.targets[0], services.begin_target()
        second.wait_ready()
        services.list_members()
        services.wait_for(client, 2, 1)
        assert not any(own.finished for own in found)
        services.kill(first)
        for response in call:
            client.take(found[response.choice], response)
        for index, own in enumerate(found):
            assert own.finished.statistics.num_target_changes == 1 and not own.moved
            assert own.comparable == client.generate([1, 2], seed=9 + index, **asked).comparable
