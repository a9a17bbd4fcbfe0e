"""Grows each session's tree of draft tokens, without a request per round.

Before every step it takes the nodes likeliest to be committed, over all sessions together, and evaluates them in one
forward pass; the results are sent as one item per session while the next step runs. A commit inside a tree re-roots it;
one outside starts a new tree in a new epoch. It runs on the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

from specdec.decoding.proposal import Proposal, ProposalRequest
from specdec.decoding.token_path import TokenPath
from specdec.draft_service.pace import Pace
from specdec.draft_service.session import DraftSession, give_back_unlikely
from specdec.draft_service.tracing import draft_span
from specdec.engine.retokenizer import Reading, Retokenizer
from specdec.engine.scheduling.feed import Feed, StepTiming
from specdec.engine.scheduling.runner import StepReport
from specdec.engine.scheduling.scheduler import NOTHING, Engine, Turn
from specdec.errors import CacheExhausted, GrammarFailed, InvalidRequest, SpecdecError
from specdec.grammar.jobs import LATE, MaskThreads, session_grammar
from specdec.protocol.calibration import Calibration
from specdec.protocol.growth import LIKELIHOOD_MIN, GrowingNode, GrowingTree
from specdec.protocol.items import Commit, Extend, MissingTokens, Nodes, Open
from specdec.protocol.limits import UINT32_MAX, check_token_ids
from specdec.protocol.noise import Lane, uniform_bits
from specdec.protocol.types import Description, Rule
from specdec.replica.handler import ABANDONED_S, Reply, check_params_tokens
from specdec.replica.masks import posting
from specdec.telemetry.tracing import Tracing

BRANCH_COUNT = 3  # guesses beside the proposal child; a fourth would be right once in thirty misses
STEPS_PER_TIMING = 4  # one step in four reports its time: saves a few bytes in the others
HELD_STEPS_MAX = 2  # further steps with which a session's nodes may leave, beside many sessions: fewer items
SESSIONS_PER_HELD_STEP = 8  # rounds of that number last several draft steps
STEP_NODES_MAX = 64  # of all sessions together: a wider step would keep the likeliest nodes waiting
READ_PER_TOKEN = 1.5  # tokens of another tokenizer for which a session has cells, by token of the target
LIKELIHOOD_MIN_MOST = 0.1  # with many sessions: a likelier path is worth its evaluation, however many wait
TREE_CELLS = 64  # beyond the committed tokens, for branches: a path's own cells are those of later tokens
DETAILED_STEP_COUNT_MAX = 2  # detailed spans after each commit; more would crowd out the rounds they serve

DraftFeed: TypeAlias = Feed[list[ProposalRequest], list[Proposal]]
PACED_SESSIONS_MIN = 8  # fewer are never too many: a machine that is slow for a moment refuses none
NEVER = 0.0  # seconds after which a retry may succeed: waiting does not help


class Drafter:
    """All sessions of a draft replica. Engine thread only.

    A session takes blocks as it uses their cells. If newly committed tokens find no cells, sessions without a commit
    for ABANDONED_S give theirs, the idlest first; if there are none, it gives all its blocks to others, and waits
    without drafts until a commit finds enough for all its tokens. If no block is free, or any session waits, a tree
    grows within the blocks that its session has. Above its capacity new sessions are refused: while one waits, where
    the prompt does not fit, or while the steps are late for the rounds of many (`Pace`).
    """

    def __init__(
        self,
        engine: Engine[list[ProposalRequest], list[Proposal]],
        description: Description,
        tracing: Tracing | None = None,
        retokenizer: Retokenizer | None = None,
        grammars: MaskThreads | None = None,
    ) -> None:
        self.description = description
        self._retokenizer = retokenizer
        self._grammars = grammars
        self._engine = engine
        self._tracing = tracing or Tracing()
        self._calibration = Calibration()
        self._pace = Pace()
        self._waiting: set[DraftSession] = set()  # sessions that found too few free blocks
        self._growing: dict[DraftSession, None] = {}  # sessions that may have nodes to evaluate, in order of arrival
        self._sessions: dict[DraftSession, None] = {}
        self._unsent: dict[DraftSession, None] = {}  # sessions with nodes to send
        self._step_began_s = 0.0
        self._step_count = 0

    @property
    def waiting_count(self) -> int:
        """The number of sessions that wait for cache blocks."""
        return len(self._waiting)

    def counters(self) -> dict[str, int]:
        """Returns no counters: a draft has none of its own."""
        return {}

    def usage(self) -> float:
        """Returns the larger share taken, of the cache blocks or of the time."""
        return max(self._engine.cache.usage, self._pace.share(time.monotonic()))

    def admit(self, item: Open, now_s: float) -> None:
        """Raises CacheExhausted above the draft's capacity: blocks for the prompt, time for the rounds."""
        since_s = now_s - ABANDONED_S
        if waiting_count := sum(one.active_s > since_s for one in self._waiting):
            raise CacheExhausted(f"{waiting_count} sessions of the draft wait for cache blocks")
        if len(self._sessions) > PACED_SESSIONS_MIN and self._pace.share(now_s) >= 1:
            raise CacheExhausted("the draft's steps are late for the rounds of the sessions it has")
        cache = self._engine.cache
        needed_count = cache.blocks_for(item.params.prompt_length)
        left_count = sum(len(one.table.block_ids) for one in self._sessions if one.active_s <= since_s)
        if needed_count > cache.free_block_count + left_count:
            free = f"{cache.free_block_count} are free"
            raise CacheExhausted(f"the prompt needs {needed_count} cache blocks of the draft, {free}")

    def check(self, item: Open) -> None:
        """Raises CacheExhausted for a prompt beyond the draft's positions or a session beyond its whole cache,
        InvalidRequest for its parameters."""
        positions_max = self.description.positions_max
        if item.params.prompt_length >= positions_max:
            raise CacheExhausted(
                f"the prompt has {item.params.prompt_length} tokens, the draft {positions_max} positions", NEVER
            )
        if self._cell_count(item) > self._engine.cache.position_count:
            raise CacheExhausted(
                f"the session needs {self._cell_count(item)} cells, the draft has {self._engine.cache.position_count}",
                NEVER,
            )
        check_params_tokens(item.params, item.vocabulary_size)

    def open(self, item: Open, reply: Reply) -> DraftSession:
        """Returns a session without blocks; its commits take them."""
        grammar = session_grammar(self._grammars, item.params, item.vocabulary_size)
        table = self._engine.cache.open(self._cell_count(item))
        growth = GrowingTree(item.params.rule, self._calibration)
        reading = Reading(self._retokenizer) if self._retokenizer else None
        session = DraftSession(item, table, reply, self._engine.cache, growth, reading, grammar)
        self._sessions[session] = None
        return session

    def close(self, session: DraftSession) -> None:
        """Releases the session's blocks."""
        del self._sessions[session]
        if session.grammar is not None:
            session.grammar.close()
        self._unsent.pop(session, None)
        self._growing.pop(session, None)
        self._waiting.discard(session)
        self._engine.cache.release(session.table)

    def extend(self, session: DraftSession, item: Extend) -> MissingTokens | None:
        """Holds committed tokens, and stops drafting until the next commit."""
        self._send([session] if session in self._unsent else [])
        missing = session.extend(item, self.description.vocabulary_size)
        if missing is None:
            session.drop_tree()
        return missing

    def work(self, session: DraftSession, item: Commit, arrived_s: float) -> MissingTokens | None:
        """Continues drafting below newly committed tokens, in the current tree or a new one. Raises SpecdecError."""
        check_token_ids("suffix_token_ids", item.suffix_token_ids, self.description.vocabulary_size)
        if item.committed_length > session.opened.length_max:
            limit = f"at most length_max {session.opened.length_max}"
            raise InvalidRequest("committed_length", item.committed_length, limit)
        positions_max = self.description.positions_max
        if item.committed_length >= positions_max < session.opened.length_max:
            raise CacheExhausted(f"the draft's {positions_max} positions are used up")
        self._send([session] if session in self._unsent else [])
        growth, known_length = session.growth, len(session.tokens)
        if growth.root is not None and item.committed_length <= known_length:
            return None
        missing = session.hold(item.suffix_start, item.suffix_token_ids)
        if missing is not None:
            return missing
        if session.window and arrived_s > session.committed_s:
            self._pace.on_commit(arrived_s - session.committed_s, arrived_s)
        session.committed_s = arrived_s
        if growth.root is not None:
            session.follow(session.tokens[known_length:])
        if growth.root is None:
            session.restart()
            if len(session.read_tokens) > min(positions_max, session.table.capacity - TREE_CELLS):
                raise CacheExhausted(f"the text has {len(session.read_tokens)} tokens of the draft: too many for it")
        if not self._find_cells(session):
            if not item.window:  # nodes are not wanted now, and another commit may never come
                self._waiting.discard(session)
            return None
        session.window = max(0, item.committed_length + item.window - len(session.tokens))
        session.nodes_per_step, session.siblings = item.nodes_per_step, item.siblings
        session.has_siblings |= item.siblings > 0
        session.wait_length = item.wait_length
        session.traced_step_count = DETAILED_STEP_COUNT_MAX if item.trace.detailed and self._tracing.is_on else 0
        session.group = item.trace
        self._grow_when_ready(session)
        return None

    def _grow_when_ready(self, session: DraftSession) -> None:
        """Lets a session's tree grow, once its grammar is compiled. Raises its error, GrammarFailed where masks would
        keep the others waiting."""
        if session.grammar is not None:

            def grow() -> None:
                if session in self._sessions and session.growth.root is not None:
                    try:
                        self._grow_when_ready(session)
                    except SpecdecError as error:
                        self._failed(session, error)

            if not session.grammar.is_ready(posting(self._engine, grow)):
                return
            if session.grammar.is_slow:
                self._growing.pop(session, None)
                raise GrammarFailed(LATE)
        self._growing[session] = None

    def _cell_count(self, item: Open) -> int:
        """Returns the number of cells for a session of full length and its tree."""
        length_max = round(item.length_max * (READ_PER_TOKEN if self._retokenizer else 1))
        return min(length_max, self.description.positions_max) + TREE_CELLS

    def _find_cells(self, session: DraftSession) -> bool:
        """Takes blocks for the committed tokens that are not fed yet. Where too few are free, also of those that idle
        sessions give up, the session gives up its own, so that waiting sessions never keep each other from growing, and
        waits."""
        while not self._grow(session, session.unfed_count):
            left = [one for one in self._sessions if one.table.block_ids and one is not session]
            idlest = min(left, key=lambda one: one.active_s, default=session)
            if idlest is session or session.active_s - idlest.active_s < ABANDONED_S:
                self._give_up_cells(session)
                self._waiting.add(session)
                return False
            self._give_up_cells(idlest)
        self._waiting.discard(session)
        return True

    def _give_up_cells(self, session: DraftSession) -> None:
        """Drops a session's tree and frees its blocks; a later commit feeds its tokens again."""
        self._send([session] if session in self._unsent else [])
        session.drop_tree()
        self._engine.cache.free(session.table)

    def _grow(self, session: DraftSession, count: int) -> bool:
        """Takes blocks until `count` cells are free, or as many as there are; returns whether these are enough."""
        cache, table = self._engine.cache, session.table
        if (lacking_count := count - session.free_cell_count) > 0:
            most = (len(table.block_ids) + cache.free_block_count) * cache.block_size
            cache.grow(table, min(session.cell_end + lacking_count, most, table.capacity))
        return session.free_cell_count >= count

    def next_step(self) -> Turn[list[ProposalRequest], list[Proposal]]:
        """Returns a step of committed tokens not fed yet, and of the likeliest nodes of all sessions."""
        self._step_began_s = time.perf_counter()
        feeds: list[DraftFeed] = []
        chosen: dict[DraftSession, list[GrowingNode]] = {}
        row_count_max = self._engine.rows_max
        for session in list(self._growing):
            if session.growth.root is not None and session.unfed_count:
                if row_count_max > 0:
                    feeds.append(self._feed(session, session.growth.root, row_count_max))
                    row_count_max -= feeds[-1].row_count
            elif nodes := self._take(session):
                chosen[session] = nodes
            else:
                del self._growing[session]
        if sum(map(len, chosen.values())) > STEP_NODES_MAX:
            give_back_unlikely(chosen, STEP_NODES_MAX)
        feeds += [self._evaluate(session, nodes) for session, nodes in chosen.items() if nodes]
        if not feeds:
            self._send(list(self._unsent))
        return Turn(feeds=feeds, done=self._on_step) if feeds else NOTHING

    def _take(self, session: DraftSession) -> list[GrowingNode]:
        """Takes the session's next nodes to evaluate, likeliest first."""
        if session.growth.root is None:
            return []
        if not self._waiting:
            self._grow(session, session.nodes_per_step)
        count = min(session.nodes_per_step, session.free_cell_count)
        if not count:
            return []
        length_max = min(session.opened.length_max, self.description.positions_max - session.shift)
        reach = min(len(session.tokens) + session.window, length_max)
        # Nodes in hand decide the rows that are left for siblings: they must not depend on the siblings' tokens.
        is_drawn_tree = session.has_siblings and session.opened.params.rule is Rule.REJECTION
        # A node takes the time of all sessions, and that of their coordinator.
        likelihood_min = min(LIKELIHOOD_MIN * len(self._sessions), LIKELIHOOD_MIN_MOST)
        is_chain, wait_reach = session.nodes_per_step == 1 or is_drawn_tree, len(session.tokens) + session.wait_length
        return session.growth.take(count, reach, is_chain, likelihood_min, wait_reach)

    def _feed(self, session: DraftSession, root: GrowingNode, row_count_max: int) -> DraftFeed:
        """Returns committed tokens not in the cache, at most a chunk beside others; the root is the last."""
        start = session.table.length
        chunk = row_count_max if len(self._growing) == 1 else self._engine.chunk_size
        token_ids = session.read_tokens[start : start + min(row_count_max, chunk)]
        is_last = start + len(token_ids) == len(session.read_tokens)
        return self._feed_of(session, [root] if is_last else [], token_ids)

    def _evaluate(self, session: DraftSession, nodes: list[GrowingNode]) -> DraftFeed:
        """Returns these nodes, each in a free cell."""
        for node in nodes:
            session.place(node)
        return self._feed_of(session, nodes, [node.token_id for node in nodes])

    def _feed_of(self, session: DraftSession, nodes: list[GrowingNode], token_ids: Sequence[int]) -> DraftFeed:
        """Returns one session's rows of a step, of which the last are of `nodes` and need logits."""
        paths = [session.growth.path(node) for node in nodes]
        growth, params, names, requests = session.growth, session.opened.params, [], []
        branch_count = session.siblings or (0 if session.nodes_per_step == 1 else BRANCH_COUNT)
        draws: tuple[int, ...] = ()
        tokens, length, width = session.tokens, len(session.tokens), session.opened.vocabulary_size
        for node, path in zip(nodes, paths):
            filed = growth.file(node)
            if filed is not None:
                session.grown.append(filed)
            names.append([growth.reserve_name() for _ in range(1 + session.siblings)])
            if params.rule is Rule.REJECTION:
                draws = tuple(uniform_bits(session.secret, Lane.DRAFT, growth.epoch, name) for name in names[-1])
            path_tokens = TokenPath(tokens, length, [node.token_id for node in path], session.counts)
            requests.append(ProposalRequest(params, path_tokens, width, draws, branch_count))
        return Feed(
            table=session.table,
            start_position=session.table.length,
            token_ids=token_ids,
            logit_count=len(nodes),
            payload=session.masked(requests, paths),
            done=partial(self._evaluated, session, nodes, names),
            failed=partial(self._failed, session),
            paths=[[node.cell for node in path] for path in paths if path],
        )

    def _evaluated(
        self,
        session: DraftSession,
        nodes: Sequence[GrowingNode],
        names: Sequence[Sequence[int]],
        proposals: list[Proposal] | None,
        timing: StepTiming,
    ) -> None:
        """Adds the proposals of a step to the tree of a session."""
        session.worked_s += timing.ended_s - self._step_began_s
        if session.grammar is not None and session.grammar.is_slow:
            self._failed(session, GrammarFailed(LATE))
            return
        for node, its_names, found in zip(nodes, names, proposals or ()):
            session.grown += session.growth.evaluated(node, its_names, found.guesses, found.draft_probs, node.cell)
        if session.grown:
            self._unsent[session] = None

    def _failed(self, session: DraftSession, error: SpecdecError) -> None:
        """A session's rows failed: no drafting until the next commit."""
        session.drop_tree()
        session.grown.clear()
        self._unsent.pop(session, None)
        session.fail(error)

    def _on_step(self, report: StepReport[list[Proposal]]) -> None:
        """Sends one item per session with nodes that are due after a step."""
        now_s = time.perf_counter()
        if report.row_count <= STEP_NODES_MAX:  # a longer one reads a prompt, which passes
            self._pace.on_step(now_s - self._step_began_s)
        for session in self._unsent:
            session.held_step_count += 1
        due = [own for own in self._unsent if own.held_step_count > self._held_steps_max(own)]
        self._send(due, report.row_count, now_s)

    def _held_steps_max(self, session: DraftSession) -> int:
        """Returns the number of further steps that a session's nodes wait for. Under REJECTION none: when the steps end
        depends on the tokens drawn, and an offer must not."""
        if session.wait_length or session.traced_step_count or session.opened.params.rule is Rule.REJECTION:
            return 0
        return min(len(self._sessions) // SESSIONS_PER_HELD_STEP, HELD_STEPS_MAX)

    def _send(self, sessions: Sequence[DraftSession], row_count: int = 0, now_s: float = 0.0) -> None:
        """Sends the nodes of these sessions, one item each; after a step of `row_count` rows, that ended at `now_s`,
        with its time now and then."""
        self._step_count += bool(sessions)
        is_timed = row_count > 0 and self._step_count % STEPS_PER_TIMING == 0
        for session in sessions:
            is_traced = row_count > 0 and session.traced_step_count > 0
            is_summed = session.opened.trace.sampled and self._tracing.is_on
            step_us = min(UINT32_MAX, round((now_s - self._step_began_s) * 1e6)) if is_timed or is_traced else 0
            nodes = Nodes(
                *session.name,
                session.growth.epoch,
                session.growth.root_length,
                tuple(session.grown),
                step_us,
                row_count if step_us else 0,
                is_detailed=is_traced,
                worked_us=min(UINT32_MAX, round(session.worked_s * 1e6)) if is_summed else 0,
                active_sessions=sum(one.window > 0 for one in self._sessions) if step_us else 0,
            )
            self._unsent.pop(session, None)
            session.worked_s = session.held_step_count = 0
            session.grown.clear()
            session.reply(nodes)
            if is_traced:
                session.traced_step_count -= 1
                span = draft_span(session, nodes, self._step_began_s, now_s, len(sessions))
                self._tracing.record((span,))
