"""The output: where a text ends, and which text is certain, one token at a time.

The reference is naive plain decoding: decode all tokens so far, search the whole text for stops. Real tokenizer,
random tokens, random groupings into rounds: grouping must not matter, and sent text may not be taken back.
"""

from __future__ import annotations

import random

import pytest
import tokenizers

from specdec.coordinator.output import Appended, OutputProcessor
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


def processor(tokenizer: Tokenizer, stop=(), stop_token_ids=(), min_tokens=0, max_tokens=1000) -> OutputProcessor:
    return OutputProcessor(tokenizer.stream(), tuple(stop), stop_token_ids, min_tokens, max_tokens)


def append_in_rounds(output: OutputProcessor, tokens, rng: random.Random) -> tuple[str, int, Appended]:
    """Feeds tokens in random rounds until the text ends."""
    text, count, place = "", 0, 0
    appended = Appended((), None)
    while place < len(tokens) and appended.ending is None:
        size = rng.randrange(1, 6)
        appended = output.append(tokens[place : place + size])
        text += "".join(appended.texts)
        count += appended.kept_count
        place += size
    return text, count, appended


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
        text, count, appended = append_in_rounds(processor(tokenizer, stop, min_tokens=min_tokens), tokens, rng)
        expected_text, expected_count = reference(library, tokens, stop, min_tokens)
        assert count == expected_count, (seed, stop)
        if appended.ending is not None:
            assert text == expected_text, (seed, stop)


def test_text_that_may_begin_a_stop_string_is_held_back(tokenizer: Tokenizer):
    """Claim: text that a later token could make part of a stop string is not sent; at the end it is released."""
    tokens = ids(tokenizer, "return 12")
    held = processor(tokenizer, stop=["12345"], max_tokens=len(tokens))
    texts = [text for token in tokens[:-1] for text in held.append([token]).texts]
    assert "1" not in "".join(texts)
    last = held.append(tokens[-1:])
    assert last.ending is not None and last.ending.reason is FinishReason.LENGTH
    assert "".join([*texts, *last.texts]) == "return 12"


def test_bytes_that_form_no_character_are_held_back(tokenizer: Tokenizer):
    """Claim: a character split over tokens appears whole; one cut by max_tokens becomes a replacement character."""
    text = "x = '日本語 é 🙂'"
    tokens = ids(tokenizer, text)
    whole = processor(tokenizer)
    texts = [piece for token in tokens for piece in whole.append([token]).texts]
    assert "".join(texts) == text and not any("\ufffd" in piece for piece in texts)
    cut = processor(tokenizer, max_tokens=len(tokens) - 2)
    appended = cut.append(tokens)
    assert appended.kept_count == len(tokens) - 2
    assert "".join(appended.texts).startswith("x = '日本語 é ")


def test_a_stop_token_counts_and_has_no_text(tokenizer: Tokenizer):
    """Claim: a stop token is output and usage; its text is not shown; before min_tokens it is an ordinary token."""
    tokens = ids(tokenizer, "a = b")
    ended = processor(tokenizer, stop_token_ids=[tokens[1]]).append(tokens)
    assert ended.kept_count == 2 and "".join(ended.texts) == "a"
    assert ended.ending is not None and ended.ending.stop_token_id == tokens[1]
    later = processor(tokenizer, stop_token_ids=[tokens[1]], min_tokens=2).append(tokens)
    assert later.ending is None and later.kept_count == len(tokens)


def test_max_tokens_ends_a_round_in_its_middle(tokenizer: Tokenizer):
    """Claim: tokens of the round beyond max_tokens do not exist: not in the text, not in the count."""
    tokens = ids(tokenizer, "one two three four")
    limited = processor(tokenizer, max_tokens=3)
    appended = limited.append(tokens)
    assert appended.kept_count == 3 == limited.count
    assert appended.ending is not None and appended.ending.reason is FinishReason.LENGTH
