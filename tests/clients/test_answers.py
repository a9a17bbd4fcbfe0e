"""What `python -m tests.clients` makes of a client's answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.clients.__main__ import CLIENTS, SCRIPTS, answers_of, differences
from tests.support.environments import environment_name
from tests.writers.__main__ import PACKAGES


def test_wrong_and_missing_answers_are_differences() -> None:
    """Claim: of the answers asked for, each that is wrong or missing is named, and no other; what was not asked for
    does not matter. Conclusive: all three kinds are there at once, with their values in the message."""
    expected = {"whole": "a text", "usage": [3, 4], "drafts": 5.0, "calls": [["look", {"n": 1}]]}
    asked = ("whole", "usage", "drafts")
    assert differences(asked, dict(expected), expected) == []
    answers = {"whole": "a text ", "drafts": 5, "calls": []}
    wrong = ["whole: 'a text ', not 'a text'", "usage: None, not [3, 4]"]
    assert differences(asked, answers, expected) == wrong
    assert differences(asked, answers | {"usage": [4, 3]}, expected)[1] == "usage: [4, 3], not [3, 4]"
    assert differences(("calls",), answers, expected) == ["calls: [], not [['look', {'n': 1}]]"]


def test_a_failed_client_is_an_error(tmp_path: Path) -> None:
    """Claim: a program that fails after its answers is an error with its last words, one that succeeds gives them.
    Conclusive: both print the same answers, made of the job that they read."""
    program = tmp_path / "client.py"
    text = "import json, sys\nprint('a notice')\nprint(json.dumps({'answers': json.load(sys.stdin)}))\n"
    program.write_text(text, encoding="utf-8")
    assert answers_of((sys.executable, program), {"n": 1}) == {"answers": {"n": 1}}
    program.write_text(text + "sys.exit('refused')\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match="^refused$"):
        answers_of((sys.executable, program), {"n": 1})


def test_every_client_has_its_program() -> None:
    """Claim: the programs in `scripts/` are those of the clients, and clients and writers that share environments have
    the same packages, with versions: otherwise each would make it again. Conclusive: both lists are compared whole."""
    assert {path.name for path in SCRIPTS.glob("*.py")} == {client.script for client in CLIENTS.values()}
    every = [client.packages for client in CLIENTS.values()] + [PACKAGES]
    environments = {environment_name(packages): packages for packages in every}
    assert all(packages == environments[environment_name(packages)] for packages in every)
    assert all("==" in package for packages in every for package in packages)
