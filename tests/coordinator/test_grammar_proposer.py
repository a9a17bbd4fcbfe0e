"""Forced text as a proposer: what is proposed, and that it is a guess like others."""

from __future__ import annotations

import json

import pytest

from specdec.client.request import make_request
from specdec.coordinator.grammars import LegalRuns
from specdec.folders import EMBEDDED_MODELS
from specdec.grammar.compiler import Compiled, Compiler
from specdec.grammar.matcher import PathMatcher
from specdec.protocol.grammar import Grammar
from specdec.protocol.types import Proposer
from specdec.rpc.convert_generate import request_from_message

END, VOCABULARY = 0, 4096
PROMPT = [7, 8, 9]
SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["first_name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    """The schema for the embedded target's tokenizer."""
    compiler = Compiler(lambda: EMBEDDED_MODELS / "target" / "tokenizer.json")
    return compiler.compile(Grammar(json_schema=json.dumps(SCHEMA)), (END,)).result(60)


def proposer_of(compiled: Compiled) -> LegalRuns:
    return LegalRuns(PathMatcher(compiled, (END,), VOCABULARY), len(PROMPT))


def proposed(compiled: Compiled, proposer: LegalRuns, text: str) -> str:
    """The text that is proposed after a prompt and this output."""
    runs = proposer.propose([*PROMPT, *compiled.tokenizer.tokenize_str(text)])
    assert all(run.proposer is Proposer.GRAMMAR for run in runs)
    return "".join(compiled.tokenizer.decode_str(list(run.token_ids)) for run in runs)


def test_the_only_text_that_may_follow_is_proposed(compiled: Compiled) -> None:
    """Claim: names and punctuation that the schema leaves no choice of are proposed, from every place of the text, as
    far as their tokens are certain; where several texts may follow, and at the end, nothing is. Conclusive: the text
    grows through all such places, and goes back, as after a lost round."""
    proposer = proposer_of(compiled)
    assert proposed(compiled, proposer, "") == '{"first_name":'
    assert proposed(compiled, proposer, '{"first') == '_name":'
    assert proposed(compiled, proposer, '{"first_name":"') == ""
    assert proposed(compiled, proposer, '{"first_name":"Bo"') == ',"age'
    assert proposed(compiled, proposer, '{"first_name":"Bo","age":1') == ""
    assert proposed(compiled, proposer, '{"first_name":"Bo","age":12}') == ""
    assert proposed(compiled, proposer, '{"first') == '_name":'


def test_another_split_of_the_text_is_as_good(compiled: Compiled) -> None:
    """Claim: the target may split forced text into other tokens than the tokenizer does; what is proposed continues
    its tokens. Conclusive: the output has one token a letter."""
    proposer = proposer_of(compiled)
    letters = [token_id for letter in '{"firs' for token_id in compiled.tokenizer.tokenize_str(letter)]
    assert len(letters) == 6
    (run,) = proposer.propose([*PROMPT, *letters])
    assert compiled.tokenizer.decode_str(list(run.token_ids)) == 't_name":'


def test_an_illegal_text_has_no_proposals(compiled: Compiled) -> None:
    """Claim: a proposer never ends a text: after tokens that are not legal, and where the grammar is slow, it proposes
    nothing, with no error."""
    assert proposed(compiled, proposer_of(compiled), "[") == ""
    slow = LegalRuns(None, len(PROMPT))
    assert proposed(compiled, slow, "") == ""


def test_a_request_may_name_every_proposer() -> None:
    """Claim: the limit of `speculative.proposers` is their number. Conclusive: each is named once, the grammar too."""
    every = tuple(own for own in Proposer if own is not Proposer.NONE)
    message = make_request([1], proposers=[f"PROPOSER_{own.name}" for own in every])
    assert request_from_message(message, 100).speculative.proposers == every
