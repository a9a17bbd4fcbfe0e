"""What a draft refuses of an encoder's input, before it takes anything. The table model is for protocol tests only:
here it stands for models of both kinds, as its description says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.decoding.proposal import proposals
from specdec.draft_service.drafter import Drafter
from specdec.engine.loading.model import load_model
from specdec.engine.scheduling.scheduler import Engine
from specdec.engine.table_model import write_table_model
from specdec.errors import InvalidRequest
from specdec.protocol.items import Open
from specdec.protocol.types import Description, ResolvedSamplingParams, Rule

PAIR = {"encoder_positions_max": 4, "beginning_token_ids": (1,)}


@pytest.mark.parametrize(
    "kind, length, limit",
    [
        (PAIR, 5, "at most 4, the positions of the encoder"),
        (PAIR, 0, "at least 1: table is an encoder-decoder model"),
        ({}, 1, "0: table is a decoder alone"),
    ],
    ids=["too long", "none", "some"],
)
def test_an_input_that_it_cannot_read_is_refused(kind: dict[str, Any], length: int, limit: str, tmp_path: Path) -> None:
    """Claim: a draft whose encoder has too few positions refuses a session, and one of another kind does, by field,
    value and limit. Conclusive: an input at the limit, or none of a decoder alone, is taken."""
    write_table_model(tmp_path / "table", 7)
    engine = Engine(load_model(str(tmp_path / "table")), 20, 16, proposals)
    drafter = Drafter(engine, Description("", "", "table", 7, 100, (), "float32", "cpu", "", **kind))

    def opened(encoder_length: int) -> Open:
        params = ResolvedSamplingParams(Rule.GREEDY, 1, 9, temperature=0.0, encoder_length=encoder_length)
        return Open(1, 1, params, 20, 7)

    with pytest.raises(InvalidRequest, match=f"params.encoder_length is {length}; it must be {limit}"):
        drafter.check(opened(length))
    drafter.check(opened(4 if kind else 0))
