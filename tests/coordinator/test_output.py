"""The walker: where a text ends, and which text is certain, one token at a time.

The reference is naive plain decoding: decode all tokens so far, search the whole text for stops. Real tokenizer,
random tokens, random groupings into rounds: grouping must not matter, and sent text may not be taken back.
"""

from __future__ import annotations

import random

import pytest
import tokenizers

from specdec.coordinator.output import OutputWalker, Walked
from specdec.coordinator.tokenizer import Tokenizer
from specdec.folders import EMBEDDED_MODELS
from specdec.protocol.types import FinishReason


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(EMBEDDED_MODELS / "target"))


@pytest.fixture(scope="module")
def library() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(EMBEDDED_MODELS / "target" / "tokenizer.json"))


def ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tokenizer.encode(text, 2048)


def walker(tokenizer: Tokenizer, stop=(), stop_token_ids=(), min_tokens=0, max_tokens=1000) -> OutputWalker:
    return OutputWalker(tokenizer.stream(), tuple(stop), stop_token_ids, min_tokens, max_tokens)


def walk_in_rounds(walker: OutputWalker, tokens, rng: random.Random) -> tuple[str, int, Walked]:
    """Feeds tokens in random rounds until the text ends."""
    text, count, place = "", 0, 0
    walked = Walked((), None)
    while place < len(tokens) and walked.ending is None:
        size = rng.randrange(1, 6)
        walked = walker.walk(tokens[place : place + size])
        text += "".join(walked.texts)
        count += walked.kept_count
        place += size
    return text, count, walked


def reference(library: tokenizers.Tokenizer, tokens, stop: list[str], min_tokens: int) -> tuple[str, int]:
    """(text, token count) by definition: the first token after min_tokens that completes a stop string ends it."""
    for count in range(1, len(tokens) + 1):
        text = library.decode(list(tokens[:count]))
        before = library.decode(list(tokens[: count - 1]))
        ends = [text.find(s, max(0, len(before) - len(s) + 1)) for s in stop]
        ends = [start for start, s in zip(ends, stop) if start >= 0 and start + len(s) > len(before)]
        if ends and count > min_tokens:
            return text[: min(ends)], count
    return library.decode(list(tokens)), len(tokens)


def test_stop_strings_end_the_text_where_plain_decoding_would(tokenizer: Tokenizer, library: tokenizers.Tokenizer):
    """Claim: token and text counts equal the definition's, however tokens are grouped into rounds."""
    source = "def f(x):\n    return self.value(x)\n\n\nclass A:\n    def g(self):\n        pass\n"
    tokens = ids(tokenizer, source)
    for seed in range(200):
        rng = random.Random(seed)
        stop = [source[i : i + rng.randrange(1, 7)] for i in (rng.randrange(len(source)) for _ in range(2))]
        min_tokens = rng.choice([0, 0, 3, 9])
        text, count, walked = walk_in_rounds(walker(tokenizer, stop, min_tokens=min_tokens), tokens, rng)
        expected_text, expected_count = reference(library, tokens, stop, min_tokens)
        assert count == expected_count, (seed, stop)
        if walked.ending is not None:
            assert text == expected_text, (seed, stop)


def test_text_that_may_begin_a_stop_string_is_held_back(tokenizer: Tokenizer):
    """Claim: text that a later token could make part of a stop string is not sent; at the end it is released."""
    tokens = ids(tokenizer, "return 12")
    held = walker(tokenizer, stop=["12345"], max_tokens=len(tokens))
    texts = [text for token in tokens[:-1] for text in held.walk([token]).texts]
    assert "1" not in "".join(texts)
    last = held.walk(tokens[-1:])
    assert last.ending is not None and last.ending.reason is FinishReason.LENGTH
    assert "".join([*texts, *last.texts]) == "return 12"


def test_bytes_that_form_no_character_are_held_back(tokenizer: Tokenizer):
    """Claim: a character split over tokens appears whole; one cut by max_tokens becomes a replacement character."""
    text = "x = '日本語 é 🙂'"
    tokens = ids(tokenizer, text)
    whole = walker(tokenizer)
    texts = [piece for token in tokens for piece in whole.walk([token]).texts]
    assert "".join(texts) == text and not any("\ufffd" in piece for piece in texts)
    cut = walker(tokenizer, max_tokens=len(tokens) - 2)
    walked = cut.walk(tokens)
    assert walked.kept_count == len(tokens) - 2
    assert "".join(walked.texts).startswith("x = '日本語 é ")


def test_a_stop_token_counts_and_has_no_text(tokenizer: Tokenizer):
    """Claim: a stop token is output and usage; its text is not shown; before min_tokens it is an ordinary token."""
    tokens = ids(tokenizer, "a = b")
    ended = walker(tokenizer, stop_token_ids=[tokens[1]]).walk(tokens)
    assert ended.kept_count == 2 and "".join(ended.texts) == "a"
    assert ended.ending is not None and ended.ending.stop_token_id == tokens[1]
    later = walker(tokenizer, stop_token_ids=[tokens[1]], min_tokens=2).walk(tokens)
    assert later.ending is None and later.kept_count == len(tokens)


def test_max_tokens_ends_a_round_in_its_middle(tokenizer: Tokenizer):
    """Claim: tokens of the round beyond max_tokens do not exist: not in the text, not in the count."""
    tokens = ids(tokenizer, "one two three four")
    limited = walker(tokenizer, max_tokens=3)
    walked = limited.walk(tokens)
    assert walked.kept_count == 3 == limited.count
    assert walked.ending is not None and walked.ending.reason is FinishReason.LENGTH
