"""Bad words of a request, from texts to token ids."""

from __future__ import annotations

from specdec.coordinator.tokenizer import Tokenizer
from specdec.errors import InvalidRequest
from specdec.protocol.limits import BAD_WORD_BYTES_MAX, BAD_WORD_TOKEN_COUNT_MAX
from specdec.protocol.request import SamplingParams


def bad_word_tokens(
    sampling: SamplingParams, tokenizer: Tokenizer, vocabulary_size: int
) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of each bad word without and with a space before; of two equal ones, or with a token that the
    target does not have, none. Raises InvalidRequest for a word without or with too many tokens, and for words that
    leave no token."""
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(sampling.bad_words):
        field, bare = f"sampling.bad_words[{index}]", word.lstrip(" ") or word
        for text in (bare, f" {bare}"):
            tokens = tokenizer.encode(text, BAD_WORD_BYTES_MAX, field)
            if not 1 <= len(tokens) <= BAD_WORD_TOKEN_COUNT_MAX:
                limit = f"1 to {BAD_WORD_TOKEN_COUNT_MAX} tokens, also with a space before"
                raise InvalidRequest(field, f"text of {len(tokens)} tokens", limit)
            if max(tokens) < vocabulary_size:
                found[tokens] = None
    single = {tokens[0] for tokens in found if len(tokens) == 1}
    allowed = set(sampling.allowed_token_ids) or range(vocabulary_size)
    if len(single) >= len(allowed) and single.issuperset(allowed):
        which = "allowed_token_ids" if sampling.allowed_token_ids else "the vocabulary"
        raise InvalidRequest("sampling.bad_words", f"all tokens of {which}", "words that leave a token")
    return tuple(found)
