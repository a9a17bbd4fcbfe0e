"""Grows each session's tree of draft tokens, without being asked per round.

Before every step it takes the nodes likeliest to be committed, over all sessions together, and evaluates them in one
forward; what comes of them leaves as one item per session while the next step runs. A commit inside a tree re-roots it;
one outside restarts it there in a new epoch. It runs on the engine thread.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.cells import Cells
from draft_service.tracing import DETAILED_STEP_COUNT_MAX, draft_span
from specdec.decoding.paths import TokenPath
from specdec.decoding.proposal import Proposal, ProposalRequest
from specdec.engine.block_table import BlockTable
from specdec.engine.interface import TreeRows
from specdec.engine.runner import Piece, StepReport
from specdec.engine.scheduler import NOTHING, Engine, Turn
from specdec.errors import CacheExhausted, InvalidRequest, SpecdecError
from specdec.protocol.growth import NO_CELL, Calibration, GrownNode, Growth
from specdec.protocol.items import Commit, DraftNode, Extend, Nodes, Open, Short
from specdec.protocol.noise import Lane, uniform_bits
from specdec.protocol.types import Description, check_token_ids
from specdec.replica.handler import check_extend, check_law_tokens
from specdec.replica.sessions import Reply, log_names, name_of
from specdec.rpc.status import failure_from_error
from specdec.telemetry.logs import get_logger
from specdec.telemetry.tracing import Tracing

BRANCH_COUNT = 3  # guesses beside the proposal child; the fourth comes true once in thirty misses
STEPS_PER_TIMING = 4  # every so many steps their time is told: a few bytes less in the others
STEP_NODES_MAX = 64  # of all sessions together: a wider step would keep the likeliest nodes waiting
TREE_CELLS = 64  # beyond its committed tokens, for branches: a path's own cells are those of tokens to come


@dataclass(slots=True, eq=False)
class DraftSession:
    """A session, its committed tokens and its tree. `secret` keys the draft's own draws, so no other noise meets them.

    `grown` are nodes to be sent when the step is over. `traced_step_count`: so many steps more are recorded in detail.
    """

    opened: Open
    reply: Reply
    table: BlockTable
    cells: Cells
    growth: Growth
    secret: int = field(default_factory=lambda: secrets.randbits(64))
    tokens: list[int] = field(default_factory=list)
    window: int = 0
    nodes_per_step: int = 1
    grown: list[DraftNode] = field(default_factory=list)
    traced_step_count: int = 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One session's part of a step: nodes, the name reserved for the proposal child of each, and the cells of its rows.

    `is_committed`: the rows are committed tokens, the root the last of them; without nodes more of them follow.
    """

    session: DraftSession
    nodes: Sequence[GrownNode]
    names: Sequence[int]
    cells: Sequence[int]
    is_committed: bool


class Drafter:
    """All sessions of a draft replica: a `ReplicaService`. Every method runs on the engine thread."""

    def __init__(self, engine: Engine, description: Description, tracing: Tracing | None = None) -> None:
        self._engine = engine
        self._description = description
        self._tracing = tracing or Tracing()
        self._calibration = Calibration()
        self._epochs = itertools.count(1)  # of all sessions, so that no name of a session opened again meets an old one
        self._growing: dict[DraftSession, None] = {}  # sessions that may have nodes to evaluate, in order of arrival
        self._step: list[Evaluation] = []
        self._step_began_s = 0.0
        self._step_count = 0

    waiting_count = 0  # a session has its room from the start

    def counters(self) -> dict[str, int]:
        """Nothing beside the engine's own."""
        return {}

    def check(self, item: Open) -> None:
        """Raises CacheExhausted for a prompt that the draft's positions do not hold, InvalidRequest for its law."""
        positions_max = self._description.positions_max
        if item.law.prompt_length >= positions_max:
            raise CacheExhausted(f"the prompt has {item.law.prompt_length} tokens, the draft {positions_max} positions")
        check_law_tokens(item.law, item.vocabulary_size)

    def open(self, item: Open, reply: Reply) -> DraftSession:
        """Reserves all the room it may need. Raises CacheExhausted."""
        table = self._engine.cache.reserve(min(item.length_max, self._description.positions_max) + TREE_CELLS)
        growth = Growth(item.law.rule, self._calibration, self._epochs)
        return DraftSession(item, reply, table, Cells(table.capacity), growth)

    def close(self, session: DraftSession) -> None:
        """Gives its blocks back."""
        self._growing.pop(session, None)
        self._engine.cache.release(session.table)

    def extend(self, session: DraftSession, item: Extend) -> Short | None:
        """Holds committed tokens, and stops drafting until the next commit."""
        check_extend(item, session.opened, self._description.vocabulary_size)
        if item.start_position > len(session.tokens):
            return Short(*name_of(session.opened), len(session.tokens))
        self._hold(session, item.start_position, item.token_ids)
        return None

    def work(self, session: DraftSession, item: Commit, arrived_s: float) -> Short | None:
        """Drafts on below newly committed tokens. Raises SpecdecError."""
        check_token_ids("suffix_token_ids", item.suffix_token_ids, self._description.vocabulary_size)
        if item.committed_length > session.opened.length_max:
            limit = f"at most length_max {session.opened.length_max}"
            raise InvalidRequest("committed_length", item.committed_length, limit)
        positions_max = self._description.positions_max
        if item.committed_length >= positions_max < session.opened.length_max:
            raise CacheExhausted(f"the draft's {positions_max} positions are used up")
        if session.growth.root is not None and item.committed_length <= len(session.tokens):
            return None
        if item.suffix_start > len(session.tokens):
            return Short(*name_of(session.opened), len(session.tokens))
        self._follow(session, item)
        session.window = max(0, item.committed_length + item.window - len(session.tokens))
        session.nodes_per_step = item.leaves
        session.traced_step_count = DETAILED_STEP_COUNT_MAX if item.trace.detailed and self._tracing.is_on else 0
        self._growing[session] = None
        return None

    def _follow(self, session: DraftSession, item: Commit) -> None:
        """Brings tokens and tree to the commit: re-roots inside the tree, else restarts there."""
        known_count = len(session.tokens) - item.suffix_start
        known, new = item.suffix_token_ids[:known_count], item.suffix_token_ids[known_count:]
        if session.growth.root is not None and tuple(session.tokens[item.suffix_start :]) == known:
            kept, freed = session.growth.commit(new)
            session.cells.commit(kept)
            session.cells.give_back(freed)
            session.tokens += new
        else:
            self._hold(session, item.suffix_start, item.suffix_token_ids)
        if session.growth.root is None:
            session.cells.truncate(len(session.tokens) - 1)  # the root is evaluated as it is fed
            session.growth.restart(session.tokens)

    def _hold(self, session: DraftSession, start_position: int, token_ids: Sequence[int]) -> None:
        """Takes committed tokens from `start_position` on and ends the epoch.

        The coordinator is the only truth: tokens that disagree replace what was held from there on.
        """
        session.cells.give_back(session.growth.drop())
        known = session.tokens[start_position : start_position + len(token_ids)]
        if known != list(token_ids[: len(known)]):
            del session.tokens[start_position:]
            session.cells.truncate(start_position)
            known = []
        session.tokens += token_ids[len(known) :]

    def next_step(self) -> Turn:
        """A step of committed tokens that are not fed yet, and of the likeliest nodes of all sessions."""
        self._step_began_s = time.perf_counter()
        self._step = []
        pieces: list[Piece] = []
        chosen: list[tuple[float, DraftSession, GrownNode]] = []
        row_count_max = self._engine.rows_max
        for session in list(self._growing):
            if session.growth.root is not None and len(session.cells.committed) < len(session.tokens):
                if row_count_max > 0:
                    pieces.append(self._feed(session, session.growth.root, row_count_max))
                    row_count_max -= len(pieces[-1].token_ids)
            elif taken := self._take(session):
                chosen += taken
            else:
                del self._growing[session]
        pieces += self._evaluate(chosen)
        return Turn(pieces=pieces, done=self._on_step) if pieces else NOTHING

    def _take(self, session: DraftSession) -> list[tuple[float, DraftSession, GrownNode]]:
        """The nodes it would have evaluated next, with their likelihoods."""
        growth, count = session.growth, min(session.nodes_per_step, session.cells.free_count)
        if growth.root is None or not count:
            return []
        length_max = min(session.opened.length_max, self._description.positions_max)
        reach = min(len(session.tokens) + session.window, length_max)
        taken = growth.take(count, reach, is_chain=session.nodes_per_step == 1)
        return [(growth.likelihood(node), session, node) for node in taken]

    def _feed(self, session: DraftSession, root: GrownNode, row_count_max: int) -> Piece:
        """Committed tokens that the cache lacks, no more than a chunk where others draft; the last one is the root."""
        start = len(session.cells.committed)
        chunk = row_count_max if len(self._growing) == 1 else self._engine.chunk_size
        token_ids = session.tokens[start : start + min(row_count_max, chunk)]
        cells = [session.cells.take(start + index) for index in range(len(token_ids))]
        nodes = [[root]] if start + len(token_ids) == len(session.tokens) else []
        return self._piece(session, nodes, cells, token_ids, session.cells.chain(cells), is_committed=True)

    def _evaluate(self, chosen: list[tuple[float, DraftSession, GrownNode]]) -> list[Piece]:
        """Pieces of the likeliest of these nodes, one for each session; the others go back to their trees."""
        if len(chosen) > STEP_NODES_MAX:
            chosen.sort(key=lambda entry: -entry[0])
        for _, session, node in chosen[STEP_NODES_MAX:]:
            if session.nodes_per_step > 1:  # a chain's node was never taken out of its tree
                session.growth.give_back(node)
        by_session: dict[DraftSession, list[list[GrownNode]]] = {}
        for _, session, node in chosen[:STEP_NODES_MAX]:
            by_session.setdefault(session, []).append(session.growth.path(node))
        pieces = []
        for session, paths in by_session.items():
            cells = [session.cells.take(path[-1].length - 1) for path in paths]
            seen = [[*(node.cell for node in path[:-1]), cell] for path, cell in zip(paths, cells)]
            token_ids = [path[-1].token_id for path in paths]
            pieces.append(self._piece(session, paths, cells, token_ids, session.cells.nodes(seen), is_committed=False))
        return pieces

    def _piece(
        self,
        session: DraftSession,
        paths: Sequence[Sequence[GrownNode]],
        cells: Sequence[int],
        token_ids: Sequence[int],
        rows: TreeRows,
        is_committed: bool,
    ) -> Piece:
        """One session's rows of a step; `paths` end with the nodes of its last rows, whose logits are asked for."""
        growth, names, requests = session.growth, [], []
        branch_count = 0 if session.nodes_per_step == 1 else BRANCH_COUNT
        for path in paths:
            filed = growth.file(path[-1])
            if filed is not None:
                session.grown.append(filed)
            names.append(growth.reserve_name())
            draft = () if is_committed else [node.token_id for node in path]
            requests.append(
                ProposalRequest(
                    session.opened.law,
                    TokenPath(session.tokens, len(session.tokens), draft),
                    session.opened.vocabulary_size,
                    uniform_bits(session.secret, Lane.DRAFT, growth.epoch, names[-1]),
                    branch_count,
                )
            )
        self._step.append(Evaluation(session, [path[-1] for path in paths], names, cells, is_committed))
        return Piece(session.table, 0, token_ids, len(paths), requests, rows)

    def _on_step(self, report: StepReport) -> None:
        """Files what a step brought, and sends one item for each session; its time is all of the step's, until here."""
        served = []
        for own, outcome in zip(self._step, report.outcomes):
            if isinstance(outcome, SpecdecError):
                self._fail(own, outcome)
                continue
            if own.is_committed:
                own.session.cells.commit(own.cells)
            found: Sequence[Proposal] = outcome or ()  # type: ignore[assignment]
            for index, (node, name, proposal) in enumerate(zip(own.nodes, own.names, found)):
                cell = NO_CELL if own.is_committed else own.cells[index]
                filed = own.session.growth.evaluated(node, name, proposal.guesses, proposal.row, cell)
                own.session.grown.append(filed)
            if own.session.grown:
                served.append(own.session)
        self._step_count += bool(served)
        for session in served:
            self._send(session, report.row_count, len(served))

    def _fail(self, own: Evaluation, error: SpecdecError) -> None:
        """A session's part of a step failed: it drafts no more until the coordinator says so."""
        session = own.session
        get_logger().warning("work failed", **log_names(session.opened), reason=error.reason)
        session.cells.give_back(own.cells)
        session.cells.give_back(session.growth.drop())
        session.grown.clear()
        session.reply(failure_from_error(error, *name_of(session.opened)))

    def _send(self, session: DraftSession, row_count: int, session_count: int) -> None:
        now_s = time.perf_counter()
        is_traced = session.traced_step_count > 0
        name = (*name_of(session.opened), session.growth.epoch, session.growth.root_length)
        step_us = began_us = 0
        if is_traced or self._step_count % STEPS_PER_TIMING == 0:
            step_us = round((now_s - self._step_began_s) * 1e6)
            began_us = int(self._step_began_s * 1e6) if is_traced else 0
        nodes = Nodes(*name, tuple(session.grown), step_us, row_count if step_us else 0, step_began_us=began_us)
        session.grown.clear()
        session.reply(nodes)
        if is_traced:
            session.traced_step_count -= 1
            span = draft_span(session.opened.trace, nodes, self._step_began_s, now_s, session_count)
            self._tracing.record((span,))
