"""Counts of a session's tokens for penalties: kept from round to round, equal to counting the whole context."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.decoding import token_path as paths_module
from specdec.decoding.logits_processors import edited_logits
from specdec.decoding.proposal import ProposalRequest, edited_rows
from specdec.decoding.token_path import TokenPath
from specdec.decoding.verification import VerificationRequest
from specdec.draft_service.session import DraftSession
from specdec.engine.cache.kv_cache import KVCache
from specdec.engine.table_model import TokenStorage
from specdec.protocol.calibration import Calibration
from specdec.protocol.growth import GrowingTree
from specdec.protocol.items import Open
from specdec.protocol.types import ResolvedSamplingParams, Rule
from specdec.target_service.session import TargetSession
from tests.exactness import reference
from tests.support.read_list import ReadList

PENALTIES = (
    {"repetition_penalty": 1.5},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.25},
    {"repetition_penalty": 0.7, "presence_penalty": -1.5, "frequency_penalty": 0.3, "logit_bias": ((0, 2.0), (5, 1.0))},
)
TOKENS = st.sampled_from((0, 1, 2, 3, 4, 5, 39))
WIDTHS = (6, 40, 50)  # of logits: without the last token; with few of all tokens; with tokens above the highest seen
TREE = (0, 1, 0, 3)  # two paths of two tokens each
FAR = torch.device("cuda")
Session = TargetSession | DraftSession


def params_of(prompt_length: int, penalties: dict, encoder_length: int = 0) -> ResolvedSamplingParams:
    own = {"temperature": 0.0, "encoder_length": encoder_length, **penalties}
    return ResolvedSamplingParams(Rule.GREEDY, seed=1, prompt_length=prompt_length, **own)


def sessions_of(prompt_length: int, penalties: dict, encoder_length: int = 0) -> tuple[TargetSession, DraftSession]:
    """A session of the target and one of the draft."""
    opened = Open(1, 1, params_of(prompt_length, penalties, encoder_length), 1 << 18, 1 << 18)
    cache = KVCache(2, 8, TokenStorage(2, 8))
    sessions = [(opened, cache.open(1 << 18), lambda answer: None) for _ in range(2)]
    return TargetSession(*sessions[0]), DraftSession(*sessions[1], cache, GrowingTree(Rule.GREEDY, Calibration()))


def rows_of(session: Session, drafts: Sequence[tuple[int, ...]], logits: torch.Tensor) -> torch.Tensor:
    """Edited logits after each of these draft tokens, as the session's service asks for them: the target for a chain or
    for a tree of two paths, all rows in one verification; the draft for its nodes, a request for each."""
    params, length = session.opened.params, len(session.tokens)
    if isinstance(session, DraftSession):
        paths = [TokenPath(session.tokens, length, draft, session.counts) for draft in drafts]
        return edited_rows([ProposalRequest(params, path, logits.shape[1]) for path in paths], logits)
    committed = TokenPath(session.tokens, length, counts=session.counts)
    if drafts[1] == drafts[3]:  # siblings differ
        request = VerificationRequest(params, 1, committed, drafts[2])
    else:
        request = VerificationRequest(params, 1, committed, (*drafts[2], *drafts[4]), parents=TREE)
    return edited_logits(logits[: request.row_count], request.contexts)


@given(
    penalties=st.sampled_from(PENALTIES),
    width=st.sampled_from(WIDTHS),
    prompt_length=st.integers(1, 6),
    encoder_length=st.integers(0, 5),
    moves=st.lists(st.tuples(st.integers(0, 12), st.lists(TOKENS, max_size=4)), max_size=8),
    paths=st.tuples(*[st.tuples(TOKENS, TOKENS)] * 2),
)
def test_kept_counts_edit_by_the_whole_path(
    penalties: dict,
    width: int,
    prompt_length: int,
    encoder_length: int,
    moves: list[tuple[int, list[int]]],
    paths: tuple,
) -> None:
    """Claim: whatever tokens are added, replaced or dropped between rounds, every row of a verification, chain or tree,
    and of the draft's nodes has the edits of its own whole path, without an encoder's input. Conclusive: every round of
    random schedules equals, bit for bit, plain Python that counts the path token by token; with few and many of the
    vocabulary's tokens, tokens that the logits lack, and counts that fall to 0 again."""
    (first, second), generator = paths, torch.Generator().manual_seed(1)
    drafts = [(), first[:1], first, second[:1], second]
    logits = torch.randn(len(drafts), width, generator=generator)
    sessions = sessions_of(prompt_length, penalties, min(encoder_length, prompt_length - 1))
    for session in sessions:
        session.hold(0, list(range(6)))
    for start, token_ids in moves:
        for session in sessions:
            session.hold(min(start, len(session.tokens)), token_ids)
            session.cut(max(prompt_length, len(session.tokens) - start % 3))
            if len(session.tokens) < prompt_length:  # no round begins inside a prompt
                continue
            edited = rows_of(session, drafts, logits)
            for row, draft, values in zip(edited, drafts, logits):
                wanted = reference.edited_logits(session.opened.params, values.tolist(), [*session.tokens, *draft])
                assert row.tolist() == wanted


@pytest.mark.parametrize("penalties", PENALTIES)
@pytest.mark.parametrize("place", [0, 1], ids=["target", "draft"])
def test_a_round_reads_only_its_new_tokens(penalties: dict, place: int) -> None:
    """Claim: a round after a long context reads the tokens committed since the round before, not the context.

    Source: penalties counted the whole context each round, 56 ms at 128k tokens. Conclusive: reads are counted.
    """
    session = sessions_of(10, penalties)[place]
    drafts, logits = [(), (1,), (1, 2), (3,), (3, 4)], torch.zeros(5, 6)
    session.tokens = ReadList([position % 6 for position in range(5000)])
    rows_of(session, drafts, logits)
    session.hold(5000, [1, 2, 3])
    session.tokens.read_count = 0
    rows_of(session, drafts, logits)
    read_count = session.tokens.read_count
    assert read_count <= 3


@pytest.mark.parametrize("penalties", PENALTIES)
@pytest.mark.parametrize("place", [0, 1], ids=["target", "draft"])
def test_a_round_builds_nothing_of_the_size_of_its_context(penalties: dict, place: int) -> None:
    """Claim: beside many distinct tokens a round makes no list, set or array of them: their counts are kept where they
    are read. Conclusive: Python and numpy allocate less than 4 bytes a token, and a list of them has 8; tensors of the
    edited rows are not counted."""
    token_ids = list(range(30_000))
    random.Random(1).shuffle(token_ids)
    session = sessions_of(10, penalties)[place]
    drafts, logits = [(), (1,), (1, 2), (3,), (3, 4)], torch.zeros(5, len(token_ids))
    session.hold(0, token_ids)
    rows_of(session, drafts, logits)
    session.hold(len(token_ids), [1, 2, 3])
    tracemalloc.start()
    try:
        rows_of(session, drafts, logits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(token_ids), peak


@given(
    moves=st.lists(st.tuples(st.integers(0, 12), st.lists(TOKENS, max_size=4), st.booleans()), min_size=1, max_size=12),
    width=st.sampled_from(WIDTHS),
)
def test_counts_on_a_device_follow_those_of_the_host(moves: list[tuple[int, list[int], bool]], width: int) -> None:
    """Claim: the copy of the counts on a device, of which only changed ones are sent, equals the host's after any
    moves, some of them without a step between. Conclusive: equality after random schedules; the device is played by
    copies in this memory, so that a count that was not sent is wrong."""
    original, kept = paths_module.sent, sessions_of(2, {"repetition_penalty": 1.5})[0]
    paths_module.sent = lambda numbers, device: numbers.clone()
    try:
        for start, token_ids, steps in moves:
            kept.hold(min(start, len(kept.tokens)), token_ids)
            if steps:
                path = TokenPath(kept.tokens, len(kept.tokens), counts=kept.counts)
                counts = path.kept_counts()
                for (columns, times), text in (
                    (counts.in_output(width, FAR), kept.tokens[2:]),
                    (counts.in_all(width, FAR), kept.tokens),
                ):
                    assert times.tolist() == [text.count(token_id) for token_id in range(columns.start, columns.stop)]
    finally:
        paths_module.sent = original
