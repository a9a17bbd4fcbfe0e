"""Grows each session's tree of draft tokens, without being asked per round.

The tree is a chain here: every step evaluates the deepest proposal child of every session, so all sessions advance
together, one token a step, up to their windows. A commit inside the tree re-roots it; one outside restarts it there in
a new epoch. It runs on the engine thread.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from specdec.decoding.proposal import Proposal, ProposalRequest
from specdec.engine.scheduler import StepTiming
from specdec.errors import CacheExhausted, InvalidRequest
from specdec.protocol.items import Commit, DraftNode, Extend, Nodes, Open, Short
from specdec.protocol.noise import Lane, uniform_bits
from specdec.protocol.tree import DraftTree, Place
from specdec.protocol.types import check_token_ids
from specdec.replica.handler import ItemHandler, check_law_tokens
from specdec.replica.sessions import HeldSession, Reply


@dataclass(slots=True, eq=False)
class DraftedSession(HeldSession):
    """A held session and its tree. `secret` keys the draft's own draws, so no other noise meets them.

    `epoch` counts restarts of the tree, `root_length` is where it began, `node_count` names its nodes.
    """

    secret: int = field(default_factory=lambda: secrets.randbits(64))
    tree: DraftTree | None = None
    window: int = 0
    epoch: int = 0
    root_length: int = 0
    node_count: int = 0

    @property
    def reach(self) -> int:
        """Longest path the tree may have: the window's end, or the end of the draft's own context."""
        return min(len(self.tokens) + self.window, self.table.capacity)

    def leaf(self) -> Place | None:
        """The place to evaluate next: the end of the proposal path, when its child stays within reach."""
        assert self.tree is not None
        path = self.tree.proposal_path(self.window)
        place = path[-1] if path else self.tree.root
        return place if place.length < self.reach else None

    def restart(self) -> None:
        """A new epoch, rooted at the tokens held."""
        self.tree = DraftTree(self.tokens)
        self.epoch += 1
        self.root_length = len(self.tokens)
        self.node_count = 0


class Drafter(ItemHandler):
    """All sessions of a draft replica. Every method runs on the engine thread."""

    def work(self, held: DraftedSession, item: Extend | Commit) -> Short | None:
        """Holds committed tokens, or drafts on below newly committed ones."""
        if isinstance(item, Extend):
            held.tree = held.feed = None
            return self._sessions.extend(held, item)
        return self._commit(held, item)

    def open(self, stream: object, item: Open, reply: Reply) -> None:
        """Checks what does not depend on room, then reserves it. Raises SpecdecError."""
        positions_max = self._description.positions_max
        if item.law.prompt_length >= positions_max:
            raise CacheExhausted(f"the prompt has {item.law.prompt_length} tokens, the draft {positions_max} positions")
        check_law_tokens(item.law, item.vocabulary_size)
        self._sessions.open(stream, item, reply, DraftedSession)

    def _commit(self, held: DraftedSession, item: Commit) -> Short | None:
        check_token_ids("suffix_token_ids", item.suffix_token_ids, self._description.vocabulary_size)
        if item.committed_length > held.opened.length_max:
            limit = f"at most length_max {held.opened.length_max}"
            raise InvalidRequest("committed_length", item.committed_length, limit)
        if item.committed_length >= held.table.capacity < held.opened.length_max:
            raise CacheExhausted(f"the draft's {held.table.capacity} positions are used up")
        if held.tree is not None and item.committed_length <= len(held.tokens):
            return None
        if item.suffix_start > len(held.tokens):
            return Short(*held.name, len(held.tokens))
        self._follow(held, item)
        held.window = item.window
        self._grow(held)
        return None

    @staticmethod
    def _follow(held: DraftedSession, item: Commit) -> None:
        """Brings tokens and tree to the commit: re-roots inside the tree, else restarts there."""
        known_count = len(held.tokens) - item.suffix_start
        agrees = held.tokens[item.suffix_start :] == list(item.suffix_token_ids[:known_count])
        if held.tree is not None and agrees and held.tree.commit(item.suffix_token_ids[known_count:]):
            return
        held.hold(item.suffix_start, item.suffix_token_ids)
        held.restart()

    def _grow(self, held: DraftedSession) -> None:
        """Feeds the path to the leaf, so that the leaf's own proposal child can be drawn."""
        leaf = held.leaf()
        if leaf is None:
            held.feed = None
            return
        assert held.tree is not None
        path = [*held.tokens, *(place.token_id for place in held.tree.proposal_path(held.window))]
        node = held.node_count + 1
        request = ProposalRequest(
            law=held.opened.law,
            path=path,
            vocabulary_size=held.opened.vocabulary_size,
            draw_bits=uniform_bits(held.secret, Lane.DRAFT, held.epoch, node),
        )
        epoch = held.epoch

        def done(proposal: Proposal, timing: StepTiming) -> None:
            if held.epoch == epoch and leaf.alive:
                held.reply(self._add(held, leaf, proposal, timing))
            self._grow(held)

        self._sessions.submit(held, path, 1, request, done)

    @staticmethod
    def _add(held: DraftedSession, leaf: Place, proposal: Proposal, timing: StepTiming) -> Nodes:
        assert held.tree is not None
        held.node_count += 1
        node = DraftNode(held.node_count, leaf.node, proposal.token_id, True, proposal.row)
        held.tree.add(held.epoch, held.root_length, node)
        step_us = round((timing.forward_s + timing.evidence_s) * 1e6)
        return Nodes(*held.name, held.epoch, held.root_length, (node,), step_us, timing.row_count)
