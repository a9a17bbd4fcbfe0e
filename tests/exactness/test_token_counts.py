"""Counts of a session's tokens for penalties: kept from round to round, equal to counting the whole context."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding.edits import PathContext, edited_logits
from specdec.decoding.paths import TokenPath
from specdec.engine.kv_cache import BlockTable
from specdec.protocol.items import Open
from specdec.protocol.types import ResolvedSamplingParams, Rule
from specdec.target_service.session import TargetSession

PENALTIES = ({"repetition_penalty": 1.5}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.25})
WIDTH = 6


class ReadList(list):
    """A list that counts the items read from it."""

    read_count = 0

    def __iter__(self):
        self.read_count += len(self)
        return super().__iter__()

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.read_count += len(found) if isinstance(index, slice) else 1
        return found


def session_of(prompt_length: int, penalties: dict) -> TargetSession:
    params = ResolvedSamplingParams(Rule.GREEDY, seed=1, prompt_length=prompt_length, temperature=0.0, **penalties)
    return TargetSession(Open(1, 1, params, 1 << 18, WIDTH), BlockTable(1 << 18, b""), lambda answer: None)


def edited(session: TargetSession, length: int, draft: tuple[int, ...], counts: object) -> torch.Tensor:
    """Edited logits of a round at this length."""
    path = TokenPath(session.tokens, length, counts=counts)
    logits = torch.linspace(-2, 2, (len(draft) + 1) * WIDTH).reshape(-1, WIDTH)
    return edited_logits(logits, [PathContext(session.opened.params, path, draft)])


@given(
    penalties=st.sampled_from(PENALTIES),
    prompt_length=st.integers(1, 6),
    moves=st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, WIDTH - 1), max_size=4)), max_size=12),
    draft=st.lists(st.integers(0, WIDTH - 1), max_size=3).map(tuple),
)
def test_kept_counts_edit_as_fresh_ones(
    penalties: dict, prompt_length: int, moves: list[tuple[int, list[int]]], draft: tuple[int, ...]
) -> None:
    """Claim: whatever tokens are added, replaced or dropped between rounds, the edited logits have the bits of a count
    of the whole context. Conclusive: every round of random schedules is compared, and the counts with `Counter`."""
    session = session_of(prompt_length, penalties)
    session.hold(0, list(range(WIDTH)))
    for start, token_ids in moves:
        session.hold(min(start, len(session.tokens)), token_ids)
        session.cut(max(1, len(session.tokens) - start % 3))
        length = len(session.tokens)
        assert torch.equal(edited(session, length, draft, session.counts), edited(session, length, draft, None))
        assert session.counts.output == Counter(session.tokens[prompt_length:])


@pytest.mark.parametrize("penalties", PENALTIES)
def test_a_round_reads_only_its_new_tokens(penalties: dict) -> None:
    """Claim: a round after a long context reads the tokens committed since the round before, not the context.

    Source: penalties counted the whole context each round, 56 ms at 128k tokens. Conclusive: reads are counted.
    """
    session = session_of(10, penalties)
    session.tokens = ReadList([position % WIDTH for position in range(5000)])
    edited(session, 5000, (1, 2), session.counts)
    session.hold(5000, [1, 2, 3])
    session.tokens.read_count = 0
    edited(session, 5003, (1, 2), session.counts)
    read_count = session.tokens.read_count
    assert read_count <= 3
