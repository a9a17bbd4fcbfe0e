"""Diagrams of docs/protocol.md against the session's own tables."""

from __future__ import annotations

from specdec.protocol.states import DRAFT_MOVES, PHASE_MOVES, DraftState, Phase
from tests.hygiene.sources import ROOT


def diagram(moves: dict) -> str:
    """A table as a Mermaid state diagram, in the table's order; moves from a state to itself are left out."""
    lines = ["stateDiagram-v2"]
    for (before, event), after in moves.items():
        if before is not after:
            lines.append(f"    {before.name} --> {after.name}: {event.name}")
    return "\n".join(lines)


def test_the_protocol_page_draws_the_sessions_own_tables() -> None:
    """Claim: docs/protocol.md draws the state machine as it is: both diagrams are the code's, letter by letter."""
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    for moves in (PHASE_MOVES, DRAFT_MOVES):
        assert f"```mermaid\n{diagram(moves)}\n```" in page, f"replace the drawing by\n{diagram(moves)}"


def test_every_state_can_be_reached_and_left() -> None:
    """Claim: no state is unreachable or a trap: each is reached from the first, and all but the end are left."""
    for moves, first, last in (
        (PHASE_MOVES, Phase.NEW, Phase.FINISHED),
        (DRAFT_MOVES, DraftState.ABSENT, None),
    ):
        reached = {first}
        while more := {after for (before, _), after in moves.items() if before in reached} - reached:
            reached |= more
        assert reached == set(type(first))
        assert {before for before, _ in moves} == reached - {last}
