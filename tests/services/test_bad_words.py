"""bad_words and allowed_token_ids on the shipped pair, through the running services."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import tokenizers

from tests.support.services import MODELS, SHAPES, Services

PROMPT = "class Node:\n    def __init__(self, value):\n"
LIBRARY = tokenizers.Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
RULES: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "coupled": {"temperature": 1, "seed": 5}}
SHORT = ("chain", "siblings", "no draft", "all proposers")
OFF = {"enabled": False}


def contains(tokens: list[int], word: list[int]) -> bool:
    """Whether the tokens have those of a word in a row."""
    return any(tokens[start : start + len(word)] == word for start in range(len(tokens)))


def begun(tokens: list[int], word: list[int]) -> bool:
    """Whether the tokens have those of a word but the last in a row, and others behind."""
    return contains(tokens[:-1], word[:-1])


def words_of(tokens: list[int]) -> list[str]:
    """Texts that the tokens contain, as two tokens each that are the tokenizer's own for the text."""
    found: dict[str, None] = {}
    for pair in pairwise(tokens):
        text = LIBRARY.decode(list(pair))
        if text.strip(" ") == text and LIBRARY.encode(text, add_special_tokens=False).ids == list(pair):
            found[text] = None
    return list(found)


@pytest.mark.parametrize("rule", RULES)
def test_bad_words_never_occur_and_speculation_changes_nothing(shipped_pair: Services, rule: str) -> None:
    """Claim: words of two tokens that a text contains are in no text that forbids them, although it begins them;
    tokens, text and logprobs are the same with every shape of draft trees and every proposer as without, and after a
    resume at every token, inside a begun word too. Conclusive: the words are those of the text itself, so they would
    come again; drafts that know the text guess them."""
    client, asked = shipped_pair.client, {"max_tokens": 40, "logprobs": 1, "ignore_eos": True, **RULES[rule]}
    plain = client.generate(PROMPT, speculative=OFF, **asked)
    words = words_of(plain.token_ids)[:6]
    assert len(words) > 2, plain.text
    asked["bad_words"] = words
    off = client.generate(PROMPT, speculative=OFF, **asked)
    tokens = [LIBRARY.encode(word, add_special_tokens=False).ids for word in words]
    assert not any(contains(off.token_ids, word) for word in tokens)
    assert any(begun(off.token_ids, word) for word in tokens)
    drafted = 0
    for name in SHORT:
        on = client.generate(PROMPT, speculative=SHAPES[name], prediction=plain.text, **asked)
        assert on.comparable == off.comparable, name
        drafted += on.finished.statistics.num_draft_tokens
    assert drafted > 0
    for cut in range(0, len(off.token_ids), 3):
        resumed = client.generate(PROMPT, resume=off.token_ids[:cut], speculative=SHAPES["siblings"], **asked)
        assert off.token_ids[:cut] + resumed.token_ids == off.token_ids, cut


@pytest.mark.parametrize("rule", RULES)
def test_only_allowed_tokens_occur_and_speculation_changes_nothing(shipped_pair: Services, rule: str) -> None:
    """Claim: a text consists of its allowed tokens only; without an end token among them it has max_tokens; equal with
    and without speculation. Conclusive: the allowed ones are half of those that the text has without the parameter."""
    client, asked = shipped_pair.client, {"max_tokens": 40, "logprobs": 1, **RULES[rule]}
    plain = client.generate(PROMPT, speculative=OFF, ignore_eos=True, **asked)
    allowed = sorted(set(plain.token_ids))[::2]
    off = client.generate(PROMPT, speculative=OFF, allowed_token_ids=allowed, **asked)
    assert len(allowed) > 2 and set(off.token_ids) <= set(allowed) and len(off.token_ids) == 40
    for name in SHORT:
        on = client.generate(PROMPT, speculative=SHAPES[name], allowed_token_ids=allowed, **asked)
        assert on.comparable == off.comparable, name
