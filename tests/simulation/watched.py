"""Expected state of one session: a restatement by paths of the tokens it may hold, offer, commit and wait for.

It sees every arrival and compares the session with it after every event. A property that does not hold raises
Violation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdec.decoding.verification import VerificationRequest
from specdec.protocol.items import Nodes, Verification, VerificationResult
from specdec.protocol.session import DraftState, Session
from specdec.protocol.types import DraftProbs, Rule, point_mass
from tests.simulation.clock import Violation
from tests.simulation.model import plain_text, round_tokens
from tests.simulation.moves import Moves
from tests.support.session_check import check_session

Path = tuple[int, ...]


def is_stale(session: Session, is_draft: bool, answer: Any) -> bool:
    """Whether an answer is of another incarnation, or a result of another round than the one in flight."""
    if is_draft:
        is_deaf = session.finished or session.draft_state in (DraftState.ABSENT, DraftState.PAUSED)
        return is_deaf or answer.incarnation != session.draft_incarnation
    flying = session.in_flight
    if isinstance(answer, VerificationResult):
        return flying is None or (answer.incarnation, answer.round_index) != (flying.incarnation, flying.round_index)
    return answer.incarnation != session.target_incarnation


def state_of(session: Session) -> tuple:
    """The state that an answer may change."""
    return (
        len(session.committed),
        session.round_index,
        session.in_flight,
        session.phase,
        session.draft_state,
        session.draft_incarnation,
        session.target_incarnation,
        session.scored_index,
        len(session.tree.named),
    )


@dataclass(slots=True, eq=False)
class Watched:
    """One session: the length checked so far, its rounds, and its moves. `table`: of the target that answered last.

    `asked`: rounds by base position. `known` and `proposed` restate the draft tree by paths alone: nodes that
    arrived below a known node, and the first proposal to arrive for each, of the draft's present incarnation.
    """

    coordinator: Any
    session: Session
    order: Any
    moves: Moves
    table: int
    seen_length: int
    wait_ends_s: dict[int, float] = field(default_factory=dict)  # by the index of the wait
    asked: dict[int, Verification] = field(default_factory=dict)
    offered_count: int = 0
    accepted_count: int = 0
    tree_count: int = 0  # rounds that accepted tokens of a tree
    incarnation: int = 0
    known: set[tuple[int, Path]] = field(default_factory=set)
    proposed: dict[Path, tuple[int, DraftProbs | None]] = field(default_factory=dict)
    drawn: dict[Path, list[int]] = field(default_factory=dict)  # after a path, in the order of the draws
    first: dict[Path, tuple[int, int]] = field(default_factory=dict)  # epoch and name of the first of them
    was_late: bool = False

    def check(self, now_s: float) -> None:
        """After every event: its own invariants, its use of the draft, and its text."""
        check_session(self.session)
        if self.coordinator.is_alive:
            self.moves.check()
        self._check_draft(now_s)
        self._check_text()

    def _check_draft(self, now_s: float) -> None:
        """A connected draft is used, an absent one is not waited for, and a wait ends at its time."""
        session = self.session
        if session.malformed_node_count:
            raise Violation(f"session {session.number} counts {session.malformed_node_count} malformed nodes")
        if session.finished or not self.coordinator.is_alive or session.policy.draft_length_cap == 0:
            return
        wait_length = session.plan.wait_length
        if session.waiting and len(session.tree.proposal_path(wait_length)) >= wait_length:
            raise Violation(f"session {session.number} waits for tokens it has")
        if session.waiting:
            self.wait_ends_s.setdefault(session.wait_index, now_s + session.plan.wait_s)
        is_late = session.draft_state is DraftState.LATE
        if is_late and not self.was_late and now_s < self.wait_ends_s[session.wait_index] - 1e-9:
            raise Violation(f"session {session.number} gave up a wait before its time")
        self.was_late = is_late

    def _check_text(self) -> None:
        """New tokens are those of plain decoding, or under REJECTION those that their round must give."""
        session = self.session
        length = len(session.committed)
        if length == self.seen_length:
            return
        new = session.committed[self.seen_length :]
        expected = self._round() if self.order.rule is Rule.REJECTION else self._plain(length)
        if new != expected[: len(new)]:
            raise Violation(f"session {session.number} committed {new} at {self.seen_length}, not {expected}")
        self.accepted_count += len(new) - 1
        self.tree_count += len(new) > 1 and bool(self.asked[length - len(new)].parents)
        self.seen_length = length

    def _plain(self, length: int) -> list[int]:
        before = self.session.committed[: self.seen_length]
        return plain_text(self.table, self.session.params, before, length)[self.seen_length :]

    def _round(self) -> list[int]:
        asked = self.asked[self.seen_length]
        before = self.session.committed[: self.seen_length]
        return round_tokens(
            self.table,
            VerificationRequest(
                self.session.params,
                asked.round_index,
                before,
                asked.draft_token_ids,
                asked.draft_probs,
                asked.parents,
            ),
        )

    def arrived(self, nodes: Nodes, paths: list[Path]) -> None:
        """Nodes of the draft's incarnation came; their true paths are given."""
        if self.incarnation != nodes.incarnation:
            self.incarnation = nodes.incarnation
            self.known.clear()
            self.proposed.clear()
            self.drawn.clear()
            self.first.clear()
        for node, path in zip(nodes.nodes, paths):
            if node.parent_id == 0 or (nodes.epoch, path[:-1]) in self.known:
                self.known.add((nodes.epoch, path))
                if node.proposal:
                    before = path[:-1]
                    self.proposed.setdefault(before, (node.token_id, node.draft_probs))
                    self.first.setdefault(before, (nodes.epoch, node.node_id))
                    drawn = self.drawn.setdefault(before, [])
                    if (nodes.epoch, node.node_id - len(drawn)) == self.first[before]:
                        drawn.append(node.token_id)

    def check_requested(self, item: Verification) -> None:
        """A round continues the committed tokens and offers all known proposals, up to the plan's draft length."""
        session, committed = self.session, self.session.committed
        if item.base_position != len(committed) or tuple(committed[item.suffix_start :]) != item.suffix_token_ids:
            raise Violation(f"{item} does not continue the committed tokens")
        first = self.asked.setdefault(item.base_position, item)
        if first is not item:
            if (first.round_index, first.content[:-3]) != (item.round_index, item.content[:-3]):
                raise Violation(f"{item} is not the round that was requested there: {first}")
            return
        self.offered_count += len(item.draft_token_ids)
        if (
            session.plan.siblings
            or session.proposers
            or session.asks_heads
            or session.head_drafts
            or session.policy.reach_min
        ):
            self._check_tree(item)
            return
        path, in_hand = tuple(committed), []
        is_known = session.draft_incarnation == self.incarnation
        while is_known and path in self.proposed and len(in_hand) < session.plan.draft_length_max:
            in_hand.append(self.proposed[path])
            path = (*path, in_hand[-1][0])
        if in_hand != list(zip(item.draft_token_ids, item.draft_probs or (None,) * len(item.draft_token_ids))):
            raise Violation(f"round {item.round_index} offers {item.draft_token_ids}, in hand are {in_hand}")

    def _check_tree(self, item: Verification) -> None:
        """A tree has as many tokens as planned, each path fits the text, and of the tokens drawn for a node those drawn
        first are offered, in their order; only one that a guess before it named is skipped."""
        session, paths = self.session, [tuple(self.session.committed)]
        if len(item.draft_token_ids) > session.plan.draft_length_max:
            raise Violation(f"{item} offers more than planned")
        offered: dict[Path, list[tuple[int, DraftProbs | None]]] = {}
        for index, token in enumerate(item.draft_token_ids):
            before = paths[item.parents[index] if item.parents else index]
            paths.append((*before, token))
            offered.setdefault(before, []).append((token, item.draft_probs[index] if item.draft_probs else None))
            if len(paths[-1]) >= session.length_max:
                raise Violation(f"{item} leaves no position for the next token")
        for before, children in offered.items():
            drawn = self.drawn.get(before, []) if item.draft_probs else []
            guessed = [token for token, row in children if row == point_mass(token)]
            own = [token for token, row in children if row is not None and row != point_mass(token)]
            expected = [token for token in drawn if token not in guessed]
            if own != expected[: len(own)]:
                raise Violation(f"of {drawn} drawn after {before}, {own} are offered beside {guessed}")
