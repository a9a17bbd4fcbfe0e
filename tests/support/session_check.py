"""The invariants of a session, for tests that look at one after every event."""

from __future__ import annotations

from specdec.protocol.session import Session
from specdec.protocol.states import DraftState
from specdec.protocol.tree_shape import check_shape
from specdec.protocol.types import Rule


def check_session(session: Session) -> None:
    """Raises AssertionError naming the broken invariant."""
    flying = session.in_flight
    assert len(session.committed) <= session.length_max, "committed tokens fit"
    assert session.tree.committed is session.committed, "the tree reads the session's committed tokens"
    session.tree.check()
    if flying is not None:
        assert flying.base_position == len(session.committed), "the base position is the committed length"
        most = max(0, min(session.policy.draft_length_cap, session.positions_left - 1))
        assert len(flying.draft_token_ids) <= most, "a round offers what was planned and fits the positions left"
        check_shape(flying.parents, flying.draft_token_ids)
        assert session.path_max > 1 or not flying.parents, "trees are offered where they are allowed"
        if session.params.rule is Rule.REJECTION:
            assert len(flying.draft_probs) == len(flying.draft_token_ids), "one distribution per draft token"
    assert not (session.waiting and flying), "a waiting session has nothing in flight"
    assert not session.waiting or session.draft_state is DraftState.READY, "only a READY draft is waited for"
    assert not (session.finished and (session.waiting or flying)), "nothing goes on after the end"
