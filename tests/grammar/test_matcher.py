"""The legal tokens along paths: a matcher that walks and returns tells the same as one that begins anew."""

from __future__ import annotations

import json
import random

import pytest
from llguidance import LLTokenizer

from specdec.errors import GrammarFailed
from specdec.folders import EMBEDDED_MODELS
from specdec.grammar.compiler import Compiled, Compiler
from specdec.grammar.matcher import PathMatcher, is_legal
from specdec.protocol.grammar import Grammar

FILE = EMBEDDED_MODELS / "target" / "tokenizer.json"
SIZE, END = 4096, 0
ROW_BYTES = SIZE // 8
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar(json_schema=json.dumps(SCHEMA)),
    Grammar(regex="(ab|ba*)+[0-9]{2}"),
    Grammar(lark='start: e\ne: e "+" e | "(" e ")" | N\nN: /[0-9]+/'),
)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(lambda: FILE)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(str(FILE), eos_token=[END])


def compiled(compiler: Compiler, grammar: Grammar) -> Compiled:
    return compiler.compile(grammar, (END,)).result()


def legal(bits: bytearray, row: int = 0) -> list[int]:
    """The legal tokens of a row."""
    return [token_id for token_id in range(SIZE) if is_legal(bits, row * ROW_BYTES, token_id)]


def tree(rng: random.Random, own: Compiled, output: list[int]) -> tuple[list[int], list[int], dict[int, list[int]]]:
    """A random tree of eight draft tokens, most of them legal, and the path of each row."""
    draft: list[int] = []
    parents: list[int] = []
    paths: dict[int, list[int]] = {0: []}
    stack = [0]
    for row in range(1, 9):
        parent = stack[-1] if rng.random() < 0.7 else rng.choice(stack)
        while stack[-1] != parent:
            stack.pop()
        try:
            options = legal(PathMatcher(own, (END,), SIZE).rows(output + paths[parent]).bits)
        except GrammarFailed:
            options = []
        token_id = rng.choice(options) if options and rng.random() < 0.85 else rng.randrange(SIZE)
        siblings = {draft[i] for i in range(row - 1) if parents[i] == parent}
        while token_id in siblings:
            token_id = (token_id + 1) % SIZE
        draft.append(token_id)
        parents.append(parent)
        paths[row] = [*paths[parent], token_id]
        stack.append(row)
    return draft, parents, paths


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda own: own.kind)
def test_a_tree_has_the_masks_of_its_paths(compiler: Compiler, grammar: Grammar) -> None:
    """Claim: each row of a tree is that of a new matcher given its path; all tokens where the path is illegal; whatever
    output, tree and illegal tokens came before, and where the output grows, is cut or replaced.

    Conclusive: 60 random trees on one matcher, of which most tokens are legal and some are ends, compared bit by bit
    with matchers that saw nothing else; output grows by random legal tokens and is cut at random.
    """
    own, rng, output = compiled(compiler, grammar), random.Random(1), list[int]()
    matcher, ended_count = PathMatcher(own, (END,), SIZE), 0
    for _ in range(60):
        draft, parents, paths = tree(rng, own, output)
        found = matcher.rows(output, draft, parents)
        for row, path in paths.items():
            try:
                expected = PathMatcher(own, (END,), SIZE).rows(output + path).bits
            except GrammarFailed:
                expected = bytearray(b"\xff" * ROW_BYTES)
            assert found.bits[row * ROW_BYTES : (row + 1) * ROW_BYTES] == expected, path
        assert not found.dead
        below = matcher.rows_of_paths(output, list(paths.values()))
        for row in paths:
            its = below.bits[row * ROW_BYTES : (row + 1) * ROW_BYTES]
            whole = found.bits[row * ROW_BYTES : (row + 1) * ROW_BYTES]
            assert its == whole or not any(its) and row in below.dead
        options = [token_id for token_id in legal(found.bits) if token_id != END]
        ended_count += not options
        output = [*output, rng.choice(options)] if options else []
        if rng.random() < 0.15:
            output = output[: rng.randrange(len(output) + 1)]
    assert grammar.kind != "regex" or ended_count


def test_ends_are_legal_where_the_text_may_end_and_alone_after_it(compiler: Compiler, tokenizer: LLTokenizer) -> None:
    """Claim: within the grammar no end token is legal; where it accepts all are; where nothing can follow they alone;
    the text of an end token within a string ends nothing.

    Conclusive: two end tokens, of which one is an ordinary token for the library; rows are compared whole.
    """
    ends = (END, 5)
    own = compiler.compile(Grammar(regex='"[a-z<|>]*"x?'), ends).result()
    matcher = PathMatcher(own, ends, SIZE)
    spelt = [token_id for letter in '"a<|end|>' for token_id in tokenizer.tokenize_str(letter)]
    inside, closed = spelt, [*spelt, *tokenizer.tokenize_str('"')]
    assert not {*ends} & {*legal(matcher.rows(inside).bits)}
    assert {*ends} < {*legal(matcher.rows(closed).bits)}
    assert {*ends} == {*legal(matcher.rows([*closed, *tokenizer.tokenize_str("x")]).bits)}


def test_what_is_illegal_in_the_committed_text_fails_it_alone(compiler: Compiler, tokenizer: LLTokenizer) -> None:
    """Claim: a committed token that is illegal, an end token among them, is GrammarFailed; the matcher then follows a
    legal text as if nothing had happened, and so does every other one of the same grammar."""
    own = compiled(compiler, GRAMMARS[0])
    matcher, other = (PathMatcher(own, (END,), SIZE) for _ in range(2))
    good = tokenizer.tokenize_str('{"name":"a')
    expected = other.rows(good).bits
    for bad in ([*good, END], [good[0], good[0]], [SIZE - 1]):
        with pytest.raises(GrammarFailed):
            matcher.rows(bad)
        assert matcher.rows(good).bits == expected == other.rows(good).bits


def test_legal_beginnings_of_guesses(compiler: Compiler, tokenizer: LLTokenizer) -> None:
    """Claim: of tokens that were not drawn those up to the first illegal one are kept, and an end token is none."""
    own = compiled(compiler, GRAMMARS[0])
    matcher = PathMatcher(own, (END,), SIZE)
    whole = tokenizer.tokenize_str('{"name":"a","age":1}')
    assert matcher.legal_count([], [*whole, END, 5]) == len(whole)
    assert matcher.legal_count(whole[:3], whole[3:]) == len(whole) - 3
    broken = [*whole[:4], tokenizer.tokenize_str("\n")[0], *whole[4:]]
    assert matcher.legal_count([], broken) == 4
    assert matcher.legal_count(whole, []) == 0


def test_a_limit_of_the_library_fails_one_text_with_its_reason(compiler: Compiler, tokenizer: LLTokenizer) -> None:
    """Claim: a grammar that exceeds a limit in the middle of a text is GrammarFailed with the library's words, and a
    draft that goes there makes a dead row, not a failure: the committed text does not."""
    bomb = Grammar(lark='start: "q~^z" X\nX: /((.{1,100}){1,100}){1,100}/')
    matcher = PathMatcher(compiler.compile(bomb, (END,)).result(), (END,), SIZE)
    path = [token_id for letter in "q~^z" for token_id in tokenizer.tokenize_str(letter)]
    found, before = matcher.rows([], path), matcher.rows(path[:3]).bits
    assert found.dead == {4} and path[3] in legal(before)
    with pytest.raises(GrammarFailed, match="too many expressions"):
        matcher.rows(path)
    assert matcher.rows(path[:3]).bits == before
