"""Bad words of a request as tokens of the shipped target's tokenizer."""

from __future__ import annotations

import pytest
import tokenizers

from specdec.coordinator.bad_words import bad_word_tokens
from specdec.coordinator.tokenizer import Tokenizer
from specdec.errors import InvalidRequest
from specdec.folders import EMBEDDED_MODELS
from specdec.protocol.request import SamplingParams

FOLDER = EMBEDDED_MODELS / "target"
LIBRARY = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
SIZE = 4096


def ids(text: str) -> tuple[int, ...]:
    """The library's own token ids."""
    return tuple(LIBRARY.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(FOLDER))


def test_words_stand_with_and_without_a_space_before(tokenizer: Tokenizer) -> None:
    """Claim: each word gives its tokens without and with a space before, whatever spaces it begins with, each sequence
    once. Conclusive: the expectation is the library's encoding of these texts."""
    found = bad_word_tokens(SamplingParams(bad_words=("self", "  self", "return None")), tokenizer, SIZE)
    assert found == (ids("self"), ids(" self"), ids("return None"), ids(" return None"))
    assert len(set(found)) == 4 and bad_word_tokens(SamplingParams(), tokenizer, SIZE) == ()


def test_a_sequence_with_a_token_that_the_target_lacks_is_left_out(tokenizer: Tokenizer) -> None:
    """Claim: of a word whose tokens without a space are beyond the target's vocabulary only those with one are kept:
    the target can never generate the others."""
    bare, spaced = ids("return"), ids(" return")
    assert max(spaced) < max(bare)
    assert bad_word_tokens(SamplingParams(bad_words=("return",)), tokenizer, max(bare)) == (spaced,)


@pytest.mark.parametrize(
    "sampling, field, limit",
    [
        ({"bad_words": ("a", "= " * 40)}, "sampling.bad_words[1]", "1 to 32 tokens"),
        ({"bad_words": ("a", "b"), "allowed_token_ids": (*ids("b"), *ids("a"))}, "sampling.bad_words", "leave a token"),
    ],
)
def test_words_beyond_their_limits_are_refused(tokenizer: Tokenizer, sampling: dict, field: str, limit: str) -> None:
    """Claim: a word of too many tokens, and words that are all allowed tokens, are refused by field and limit."""
    with pytest.raises(InvalidRequest, match=limit) as caught:
        bad_word_tokens(SamplingParams(**sampling), tokenizer, SIZE)
    assert caught.value.field == field


def test_words_that_are_the_whole_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    """Claim: words that leave no token of a vocabulary are refused; with one token more they are not."""
    sampling = SamplingParams(bad_words=tuple(LIBRARY.id_to_token(token_id) for token_id in range(3)))
    with pytest.raises(InvalidRequest, match="all tokens of the vocabulary'; it must be words that leave a token"):
        bad_word_tokens(sampling, tokenizer, 3)
    assert bad_word_tokens(sampling, tokenizer, 4) == ((0,), (1,), (2,))
