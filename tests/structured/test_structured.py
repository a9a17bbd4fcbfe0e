"""The short form of `python -m tests.structured`, and that its judge finds what is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specdec.v1 import coordinator_service_pb2 as pb
from tests.structured.__main__ import Judge, main
from tests.structured.schemas import SCHEMAS
from tests.support.services import MODELS

PERSON = next(own for own in SCHEMAS if own.name == "person")


def ended(judge: Judge, text: str, reason: int) -> Any:
    """An outcome with this text."""
    finished = SimpleNamespace(reason=reason)
    return SimpleNamespace(text=text, token_ids=judge.token_ids(text), finished=finished)


def test_the_judge_finds_invalid_texts() -> None:
    """Claim: a text that ended with a stop is judged by its schema, one that was cut by whether a valid text begins so.
    Conclusive: of each kind a right and a wrong one."""
    judge, stop, length = Judge(MODELS / "target" / "tokenizer.json"), pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH
    right = '{"first_name":"A","last_name":"B","age":7}'
    assert judge.wrong(PERSON, ended(judge, right, stop)) == ""
    assert "121" in judge.wrong(PERSON, ended(judge, right.replace("7", "121"), stop))
    assert judge.wrong(PERSON, ended(judge, right[:9], stop))
    for size in range(len(right)):
        assert judge.wrong(PERSON, ended(judge, right[:size], length)) == ""
    assert "illegal" in judge.wrong(PERSON, ended(judge, '{"name', length))


@pytest.mark.more
def test_texts_under_schemas_are_valid() -> None:
    """Claim: texts under each of the 40 schemas are valid or begin valid ones, and are the same without speculation."""
    assert main(["--texts", "40", "--streams", "4", "--max-tokens", "120", "--check"]) == 0
