"""Reports on their way to the client: a delta split for sending."""

from __future__ import annotations

import pytest

from specdec.protocol.limits import DELTA_TOKEN_COUNT_MAX, DRAFT_LENGTH_LIMIT, LOGPROBS_MAX, TOKENS_MAX
from specdec.protocol.report import Delta, Round
from specdec.protocol.types import Description, PositionLogprobs, Proposer, TokenKind
from specdec.rpc.convert_generate import event_to_message
from specdec.rpc.limits import MESSAGE_BYTES_MIN

TARGET = Description("digest", "print", "name", 7, 100, (1,), "float32", "cpu", "torch")


def byte_size(delta: Delta) -> int:
    return event_to_message(delta, TARGET).ByteSize()


def test_a_merged_delta_is_sent_in_messages_that_fit() -> None:
    """Claim: deltas that a slow client left undelivered, merged into one of 35,000 tokens with 20 log-probabilities
    each, leave in messages that a client of any library accepts, 4 MiB at most, and hold the same tokens and text (a
    finding by reading: the tail of such a text never arrived). Conclusive: the merged delta alone exceeds that limit.
    """
    ids = tuple(range(200_000, 200_000 + LOGPROBS_MAX))
    position = PositionLogprobs(-1.5, ids, (-2.5,) * LOGPROBS_MAX)
    count = 35_000
    lengths = tuple(index % 7 for index in range(count))
    text = "".join(chr(0x4E00 + index % 99) * length for index, length in enumerate(lengths))
    merged = Delta(3, tuple(range(count)), (TokenKind.BONUS,) * count, text, lengths, (position,) * count)
    assert byte_size(merged) > MESSAGE_BYTES_MIN
    parts = list(merged.parts())
    assert all(len(part.token_ids) <= DELTA_TOKEN_COUNT_MAX for part in parts)
    assert max(map(byte_size, parts)) < MESSAGE_BYTES_MIN / 4
    assert all(len(part.text) == sum(part.text_lengths) for part in parts)
    whole = parts[0]
    for part in parts[1:]:
        assert part.first_output_index == whole.first_output_index + len(whole.token_ids)
        whole = whole.merged(part)
    assert whole == merged


@pytest.mark.parametrize("sizes", [(1,) * 3000, tuple(1 + index % 65 for index in range(200)), (3,) * 1024])
def test_a_merged_delta_cuts_no_round(sizes: tuple[int, ...]) -> None:
    """Claim: the parts of a merged delta have their own rounds, of which none is cut, in messages that fit, though each
    round has all the draft tokens and log-probabilities that it can have. Conclusive: rounds of one token are as many
    as a part can have; merged again the parts are the delta."""
    count = sum(sizes)
    ids = tuple(range(TOKENS_MAX - DRAFT_LENGTH_LIMIT, TOKENS_MAX))
    position = PositionLogprobs(-1.5, ids[:LOGPROBS_MAX], (-2.5,) * LOGPROBS_MAX)
    offered = ids, tuple(range(DRAFT_LENGTH_LIMIT)), (Proposer.HEADS,) * DRAFT_LENGTH_LIMIT
    rounds = tuple(Round(index, *offered, tuple(range(size - 1)), size, 0.1) for index, size in enumerate(sizes))
    kinds, lengths, proposers = (TokenKind.ACCEPTED,) * count, (3,) * count, (Proposer.HEADS,) * count
    merged = Delta(0, tuple(range(count)), kinds, "x" * 3 * count, lengths, (position,) * count, proposers, rounds)
    parts = list(merged.parts())
    for part in parts:
        assert len(part.rounds) <= len(part.token_ids) <= DELTA_TOKEN_COUNT_MAX
        assert sum(own.num_output_tokens for own in part.rounds) == len(part.token_ids)
        assert byte_size(part) < MESSAGE_BYTES_MIN / 2
    assert len(parts) <= 2 * -(-count // DELTA_TOKEN_COUNT_MAX)
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.merged(part)
    assert whole == merged


def test_a_short_delta_is_sent_as_it_is() -> None:
    """Claim: a delta of an ordinary round, log-probabilities or not, is one message, the same."""
    delta = Delta(0, (1, 2), (TokenKind.ACCEPTED, TokenKind.BONUS), "ab", (1, 1))
    assert list(delta.parts()) == [delta]
