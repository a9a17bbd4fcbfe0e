"""Grows each session's tree of draft tokens, without being asked per round.

Before every step it takes the places likeliest to be committed, over all sessions together, and feeds their paths; what
comes of them leaves as one item per session. A commit inside a tree re-roots it; one outside restarts it there in a
new epoch. It runs on the engine thread.
"""

from __future__ import annotations

import itertools
import secrets
import time
from dataclasses import dataclass, field

from draft_service.lanes import drop, lane_for, settle
from draft_service.tracing import DETAILED_STEP_COUNT_MAX, draft_span
from specdec.decoding.proposal import Proposal, ProposalRequest
from specdec.engine.scheduler import StepTiming
from specdec.errors import CacheExhausted, InvalidRequest, SpecdecError
from specdec.protocol.calibration import Calibration
from specdec.protocol.growth import Candidate, Growth
from specdec.protocol.items import Commit, DraftNode, Extend, Nodes, Open, Short
from specdec.protocol.noise import Lane as NoiseLane
from specdec.protocol.noise import uniform_bits
from specdec.protocol.tree import Guess
from specdec.protocol.types import check_token_ids
from specdec.replica.handler import ItemHandler, check_law_tokens
from specdec.replica.sessions import HeldSession, HeldSessions, Reply
from specdec.telemetry.tracing import Tracing

BRANCH_COUNT = 3  # guesses beside the proposal child; the fourth comes true once in thirty misses
STEPS_PER_TIMING = 4  # every so many steps their time is told: a few bytes less in the others
STEP_LEAVES_MAX = 64  # of all sessions together: a wider step would keep the likeliest places waiting


@dataclass(slots=True, eq=False)
class DraftedSession(HeldSession):
    """A held session and its tree. `secret` keys the draft's own draws, so no other noise meets them.

    `grown` are nodes to be sent when the step is over. `is_cramped`: branches once took the room its own path needed,
    so it grows a chain from there on. `traced_step_count`: so many steps more are recorded in detail.
    """

    growth: Growth = field(kw_only=True)
    secret: int = field(default_factory=lambda: secrets.randbits(64))
    window: int = 0
    leaves: int = 1
    grown: list[DraftNode] = field(default_factory=list)
    is_cramped: bool = False
    traced_step_count: int = 0

    @property
    def reach(self) -> int:
        """Longest path the tree may have: the window's end, or the end of the draft's own context."""
        return min(len(self.tokens) + self.window, self.capacity)


class Drafter(ItemHandler):
    """All sessions of a draft replica. Every method runs on the engine thread."""

    def __init__(self, sessions: HeldSessions) -> None:
        super().__init__(sessions)
        self._calibration = Calibration()
        self._epochs = itertools.count(1)  # of all sessions, so that no name of a session opened again meets an old one
        self._growing: dict[DraftedSession, None] = {}  # sessions that may have places to evaluate, in order of arrival
        self._in_step: list[DraftedSession] = []
        self._cramped: dict[DraftedSession, None] = {}
        self._step_began_s = 0.0
        self._step_row_count = 0
        self._step_count = 0
        self._tracing = Tracing()

    def work(self, held: DraftedSession, item: Extend | Commit) -> Short | None:
        """Holds committed tokens, or drafts on below newly committed ones."""
        if isinstance(item, Extend):
            self._stop(held)
            return self._sessions.extend(held, item)
        return self._commit(held, item)

    def open(self, stream: object, item: Open, reply: Reply) -> None:
        """Checks what does not depend on room, then reserves it. Raises SpecdecError."""
        positions_max = self._description.positions_max
        if item.law.prompt_length >= positions_max:
            raise CacheExhausted(f"the prompt has {item.law.prompt_length} tokens, the draft {positions_max} positions")
        check_law_tokens(item.law, item.vocabulary_size)

        def make(opened: Open, lanes: list, answer: Reply) -> DraftedSession:
            growth = Growth(opened.law.rule, self._calibration, self._epochs)
            return DraftedSession(opened, lanes, answer, growth=growth)

        try:
            self._sessions.open(stream, item, reply, make)
        except CacheExhausted:
            if not self._give_up_branches():
                raise
            self._sessions.open(stream, item, reply, make)

    def trace_to(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def _give_up_branches(self) -> int:
        """Releases every idle branch lane: a new session is worth more. Returns how many there were."""
        count = 0
        for held in self._sessions.all():
            for lane in [lane for lane in held.lanes[1:] if lane.feed is None]:
                drop(held, lane, self._sessions.engine.cache)
                count += 1
        return count

    def _commit(self, held: DraftedSession, item: Commit) -> Short | None:
        check_token_ids("suffix_token_ids", item.suffix_token_ids, self._description.vocabulary_size)
        if item.committed_length > held.opened.length_max:
            limit = f"at most length_max {held.opened.length_max}"
            raise InvalidRequest("committed_length", item.committed_length, limit)
        if item.committed_length >= held.capacity < held.opened.length_max:
            raise CacheExhausted(f"the draft's {held.capacity} positions are used up")
        if held.growth.tree is not None and item.committed_length <= len(held.tokens):
            return None
        if item.suffix_start > len(held.tokens):
            return Short(*held.name, len(held.tokens))
        self._follow(held, item)
        held.window = max(0, item.committed_length + item.window - len(held.tokens))
        held.leaves = 1 if held.is_cramped else item.leaves
        held.traced_step_count = DETAILED_STEP_COUNT_MAX if item.trace.detailed and self._tracing.is_on else 0
        self._growing[held] = None
        return None

    def _follow(self, held: DraftedSession, item: Commit) -> None:
        """Brings tokens and tree to the commit: re-roots inside the tree, else restarts there."""
        known_count = len(held.tokens) - item.suffix_start
        agrees = held.tokens[item.suffix_start :] == list(item.suffix_token_ids[:known_count])
        growth = held.growth
        if not (growth.tree is not None and agrees and growth.commit(item.suffix_token_ids[known_count:])):
            self._stop(held)
            held.hold(item.suffix_start, item.suffix_token_ids)
            growth.restart(held.tokens)
        settle(held, self._sessions.engine.cache)

    def _stop(self, held: DraftedSession) -> None:
        """Ends the growth of this epoch; feeds that have not run never will."""
        held.growth.drop()
        held.grown.clear()
        for lane in held.lanes:
            lane.feed = None

    def before_step(self) -> float:
        """Sends what the last step made, and feeds the likeliest places of all sessions."""
        self._send()
        self._restart_cramped()
        chosen: list[tuple[float, DraftedSession, Candidate]] = []
        for held in list(self._growing):
            taken = self._take(held)
            if not taken:
                del self._growing[held]
            chosen += taken
        chosen.sort(key=lambda entry: -entry[0])
        for _, held, candidate in chosen[STEP_LEAVES_MAX:]:
            held.growth.give_back(candidate)
        self._step_began_s = time.perf_counter()
        for _, held, candidate in chosen[:STEP_LEAVES_MAX]:
            self._evaluate(held, candidate)
        return 0.0

    def _take(self, held: DraftedSession) -> list[tuple[float, DraftedSession, Candidate]]:
        if held.lanes[0].table.is_released or held.growth.tree is None:
            return []
        taken = held.growth.take(held.leaves, held.reach, is_chain=held.leaves == 1)
        return [(held.growth.likelihood(candidate), held, candidate) for candidate in taken]

    def _evaluate(self, held: DraftedSession, candidate: Candidate) -> None:
        """Feeds the path to a place, so that its children can be guessed."""
        growth = held.growth
        path = [*held.tokens, *growth.path(candidate)]
        lane = lane_for(held, path, self._sessions.engine.cache)
        if lane is None:
            growth.give_back(candidate)
            return
        place, filed = growth.place(candidate)
        epoch, node = growth.epoch, growth.reserve_node()
        request = ProposalRequest(
            law=held.opened.law,
            path=path,
            vocabulary_size=held.opened.vocabulary_size,
            draw_bits=uniform_bits(held.secret, NoiseLane.DRAFT, epoch, node),
            branch_count=0 if held.leaves == 1 else BRANCH_COUNT,
        )

        def done(proposal: Proposal, timing: StepTiming) -> None:
            self._growing[held] = None
            if growth.epoch != epoch or growth.tree is None or not growth.is_below_root(place):
                return
            guesses = [
                Guess(token_id, rank, confidence) for rank, (token_id, confidence) in enumerate(proposal.guesses)
            ]
            filed_nodes = [] if filed is None else [filed]
            self._keep(held, [*filed_nodes, growth.evaluated(place, node, guesses, proposal.row)], timing)

        self._sessions.submit(held, lane, path, 1, request, done, lambda error: self._make_room(held, error))

    def _make_room(self, held: DraftedSession, error: SpecdecError) -> bool:
        """A step found no block to copy into: the session starts again without branches once the step is over.

        Its own path has room, which was reserved. False for any other error, and when there are no branches left.
        """
        if not isinstance(error, CacheExhausted) or (held.is_cramped and held not in self._cramped):
            return False
        held.is_cramped = True
        self._cramped[held] = None
        return True

    def _restart_cramped(self) -> None:
        for held in self._cramped:
            if held.lanes[0].table.is_released or held.growth.tree is None:
                continue
            held.leaves = 1
            self._stop(held)
            for lane in held.lanes[1:]:
                drop(held, lane, self._sessions.engine.cache)
            held.growth.restart(held.tokens)
            self._growing[held] = None
        self._cramped.clear()

    def _keep(self, held: DraftedSession, nodes: list[DraftNode], timing: StepTiming) -> None:
        """Keeps what one place brought until the step is over."""
        if not held.grown:
            self._in_step.append(held)
        held.grown += nodes
        self._step_row_count = timing.row_count

    def _send(self) -> None:
        """One item for each session the last step served; its time is all of the step's, until here."""
        if not self._in_step:
            return
        self._step_count += 1
        is_told = self._step_count % STEPS_PER_TIMING == 0
        for held in self._in_step:
            if held.grown:
                self._send_grown(held, is_told)
                held.grown = []
        self._in_step.clear()

    def _send_grown(self, held: DraftedSession, is_told: bool) -> None:
        now_s = time.perf_counter()
        is_traced = held.traced_step_count > 0
        name = (*held.name, held.growth.epoch, held.growth.root_length)
        nodes = Nodes(*name, tuple(held.grown))
        if is_told or is_traced:
            step_us = round((now_s - self._step_began_s) * 1e6)
            began_us = int(self._step_began_s * 1e6) if is_traced else 0
            nodes = nodes._replace(step_us=step_us, step_rows=self._step_row_count, step_began_us=began_us)
        held.reply(nodes)
        if is_traced:
            held.traced_step_count -= 1
            span = draft_span(held.opened.trace, nodes, self._step_began_s, now_s, len(self._in_step))
            self._tracing.record((span,))
