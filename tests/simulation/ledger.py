"""Record of everything computed, named, offered and answered in a run, and the properties it must have.

It sees every event and trusts no reported path: paths follow from names and committed tokens alone. Any property that
does not hold raises Violation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from specdec.decoding.prompt_logprobs import PromptRows, TargetOutput, TargetWork
from specdec.decoding.proposal import Proposal, ProposalRequest
from specdec.decoding.verification import VerificationRequest
from specdec.engine.interface import Chunk
from specdec.protocol.calibration import Calibration
from specdec.protocol.growth import GrowingTree
from specdec.protocol.heads import HeadToken
from specdec.protocol.items import Close, Commit, Extend, Nodes, Open, Verification, VerificationResult
from specdec.protocol.noise import Lane, uniform_bits
from specdec.protocol.rejection import conclude
from specdec.protocol.session import Session
from specdec.protocol.tree import head_epoch
from specdec.protocol.types import DraftNode, DraftProbs, PromptLogprobs, Proposer, Rule, point_mass
from specdec.target_service import heads as heads_module
from tests.simulation.client import Client, Order, earlier_text
from tests.simulation.clock import Violation
from tests.simulation.model import (
    VOCABULARY_SIZE,
    CachedRows,
    cached_paths,
    head_proposals,
    output_at,
    plain_text,
    prompt_scores,
    proposal_after,
    table_of,
    verification_paths,
)
from tests.simulation.moves import Moves
from tests.simulation.watched import Path, Watched, is_stale, state_of

FEATURE_HEAD = 9  # its table among those of drafts
Drawn = tuple[int, Path, int, DraftProbs | None]  # seed, path, the token proposed after it, its distribution


def span_of(item: Any) -> tuple[int, int]:
    """(first, end) of the committed tokens an item carries."""
    if isinstance(item, Extend):
        return item.start_position, item.start_position + len(item.token_ids)
    if isinstance(item, Commit):
        return item.suffix_start, item.committed_length
    return (item.suffix_start, item.base_position) if isinstance(item, Verification) else (0, 0)


@dataclass(slots=True, eq=False)
class Ledger:
    """The books of one run over one pair of tables."""

    table: int
    sessions: dict[tuple[Any, int], Watched] = field(default_factory=dict)
    proposals: dict[tuple[int, Path], list[tuple[int, DraftProbs | None]]] = field(default_factory=dict)
    names: dict[tuple, Path] = field(default_factory=dict)
    reach: dict[tuple, tuple[int, int]] = field(default_factory=dict)
    sent_length: dict[tuple, int] = field(default_factory=dict)
    draws: set[int] = field(default_factory=set)
    scored_count: int = 0  # prompt tokens whose log-probabilities clients have read
    rounds: dict[tuple[int, int, int], tuple] = field(default_factory=dict)
    evaluated: list[Drawn] = field(default_factory=list)
    unsent: dict[Drawn, tuple[Any, int]] = field(default_factory=dict)
    live: list[Watched] = field(default_factory=list)
    running: list[Moves] = field(default_factory=list)  # of the live sessions, and of some that have ended
    pairs: set[tuple[int, int]] = field(default_factory=set)  # neighbours in any committed or predicted text
    predicted: set[tuple[int, int]] = field(default_factory=set)  # seed, first token of the prediction
    guessing: set[int] = field(default_factory=set)  # seeds of sessions with proposers of the coordinator
    head_roots: dict[int, tuple[tuple[DraftNode, ...], Path]] = field(default_factory=dict)  # by identity of the nodes
    of_heads: dict[tuple[int, Path], list[list[HeadToken]]] = field(
        default_factory=dict
    )  # by seed and the path of the row

    def on_session(self, coordinator: Any, session: Session, order: Order) -> Watched:
        """A generation begins."""
        moves = Moves(coordinator, session, self.running)
        watched = Watched(coordinator, session, order, moves, self.table, len(session.committed))
        self.sessions[coordinator.loop, session.number] = watched
        self.live.append(watched)
        self.pairs.update(pairwise(session.committed))
        self.pairs.update(pairwise(order.prediction))
        if Proposer.SUFFIX in order.proposers:
            self.pairs.update(pairwise(earlier_text(order)))
        self.predicted.update((session.params.seed, token) for token in order.prediction[:1])
        if session.proposers:
            self.guessing.add(session.params.seed)
        self.running[:] = [own.moves for own in self.live]
        return watched

    def check_sessions(self, now_s: float) -> None:
        """After every event; a session that has ended is looked at once more."""
        for watched in self.live:
            seen_length = watched.seen_length
            watched.check(now_s)
            self.pairs.update(pairwise(watched.session.committed[max(0, seen_length - 1) :]))
        self.live = [watched for watched in self.live if not watched.session.finished]

    def sampler(
        self, table: int, requests: Sequence[TargetWork], counts: Sequence[int], rows: CachedRows, _: None
    ) -> list[TargetOutput]:
        """The sampler of a target's engine. A round always has one content, and one answer of equal numerics."""
        results: list[TargetOutput] = []
        start = 0
        for request, count in zip(requests, counts):
            if isinstance(request, PromptRows):
                results.append(prompt_scores(table, request, rows[start : start + count]))
                start += count
                continue
            paths = cached_paths(rows[start : start + count], verification_paths(request))
            start += count
            found = output_at(table, request, paths)
            name = request.params.seed, request.round_index, table
            tree = request.draft_token_ids, request.draft_probs, request.parents
            content = tuple(request.committed), *tree
            if request.params.rule is Rule.REJECTION and self.rounds.setdefault(name, (content, found)) != (
                content,
                found,
            ):
                raise Violation(
                    f"round {name[1]} has two contents or answers: {self.rounds[name]} and {content, found}"
                )
            self.check_offer(request.params.seed, content[0], *tree)
            results.append(found)
        return results

    def read_heads(
        self,
        requests: Sequence[TargetWork],
        _chunks: Sequence[Chunk],
        hidden: Sequence[CachedRows],
        outputs: Sequence[TargetOutput],
    ) -> list[TargetOutput]:
        """The heads of a target. The hidden state of a row is the text that the cache holds for it."""
        found = list(outputs)
        for index, row in heads_module.last_rows(requests, outputs).items():
            path = tuple(hidden[index][row])
            proposals = head_proposals(self.table, path)
            self.of_heads[requests[index].params.seed, path] = proposals.candidates
            found[index] = outputs[index]._replace(head_proposals=proposals)
        for index, request in enumerate(requests):
            if isinstance(request, VerificationRequest) and request.head_plan.window:
                verdict = conclude(request.params, request, outputs[index])
                path = (*hidden[index][verdict.last_row], verdict.next_token_id)
                found[index] = found[index]._replace(head_nodes=self._head_nodes(request, path))
        return found

    def _head_nodes(self, request: VerificationRequest, path: Path) -> tuple[DraftNode, ...]:
        """The tree of the target's feature head below a path: every token is recorded as proposed."""
        params, plan, growth = request.params, request.head_plan, GrowingTree(request.params.rule, Calibration())
        growth.restart(path)
        is_drawn, sent = params.rule is Rule.REJECTION, []
        is_chain = plan.nodes_per_step == 1 or (is_drawn and plan.siblings > 0)
        for _ in range(plan.window):
            for node in growth.take(plan.nodes_per_step, len(path) + plan.window, is_chain):
                own = (*path, *(below.token_id for below in growth.path(node)))
                sent += filter(None, [growth.file(node)])
                names = [growth.reserve_name() for _ in range(1 + plan.siblings)]
                bits = (uniform_bits(request.head_secret, Lane.DRAFT, request.round_index, name) for name in names)
                asked = ProposalRequest(params, own, VOCABULARY_SIZE, tuple(bits) if is_drawn else (), 3)
                made = proposal_after(self.table, FEATURE_HEAD, asked, own)
                entries = [(token, made.draft_probs) for token, _ in made.guesses]
                self.proposals.setdefault((params.seed, own), []).extend(entries[: len(names)] if is_drawn else entries)
                sent += growth.evaluated(node, names, made.guesses, made.draft_probs)
        nodes = tuple(sent)
        self.head_roots[id(nodes)] = nodes, path
        return nodes

    def _on_head_nodes(self, watched: Watched, answer: VerificationResult) -> None:
        """A result with nodes of a feature head arrives: they replace those of the result before. One that lacks a row
        is not taken."""
        flying, nodes = watched.session.in_flight, answer.output.head_nodes
        if nodes and len(answer.output.recovered_token_ids) == 1 + len(flying.draft_token_ids):
            paths = {0: self.head_roots[id(nodes)][1]}
            for node in nodes:
                paths[node.node_id] = (*paths[node.parent_id], node.token_id)
            name = answer.session, head_epoch(answer.round_index), 1, len(paths[0])
            watched.arrived(Nodes(*name, nodes), [paths[node.node_id] for node in nodes])

    def propose(
        self,
        draft: int,
        payloads: Sequence[Sequence[ProposalRequest]],
        counts: Sequence[int],
        rows: CachedRows,
        _: None,
    ) -> list[list[Proposal]]:
        """The sampler of the engine of a draft model. Every proposal is recorded, and must be sent."""
        results = []
        requests = [request for payload in payloads for request in payload]
        paths = cached_paths(rows, [request.path for request in requests])
        for request, path in zip(requests, paths):
            proposal = proposal_after(self.table, draft, request, path)
            if not self.draws.isdisjoint(request.draws):
                raise Violation(f"a draw after {path} was used before")
            self.draws.update(request.draws)
            tokens = [token for token, _ in proposal.guesses]
            for token in tokens[: len(request.draws)] if request.draws else tokens:
                entry = request.params.seed, tuple(path), token, proposal.draft_probs
                self.proposals.setdefault(entry[:2], []).append(entry[2:])
                if request.draws or token == proposal.token_id:
                    self.evaluated.append(entry)
            results.append(proposal)
        made = iter(results)
        return [[next(made) for _ in range(count)] for count in counts]

    def after_draft_step(self, held: Iterable[Any], answers: Sequence[tuple[Any, Any]]) -> None:
        """A draft step is over: all it evaluated is sent, whatever was drawn."""
        for entry in self.evaluated:
            owners = [session for session in held if session.opened.params.seed == entry[0]]
            if len(owners) == 1:  # else a session that was lost and its successor are held: the owner is unknown
                self.unsent[entry] = owners[0], owners[0].growth.epoch
        self.evaluated.clear()
        for stream, answer in answers:
            if isinstance(answer, Nodes):
                self._on_nodes(stream, answer)
        for (_, path, token, _), (held, epoch) in self.unsent.items():
            growth = held.growth
            is_overtaken = growth.root is None or growth.epoch != epoch or held.table.is_released
            if not is_overtaken and path[: len(held.tokens)] == tuple(held.tokens):
                raise Violation(f"token {token} was proposed after {path} and not sent")
        self.unsent.clear()

    def _on_nodes(self, stream: Any, nodes: Nodes) -> None:
        watched = self.sessions[stream.link.loop, nodes.session]
        name = stream, nodes.session, nodes.incarnation
        root = tuple(watched.session.committed[: nodes.root_length])
        for node in nodes.nodes:
            parent = root if node.parent_id == 0 else self.names[*name, nodes.epoch, node.parent_id]
            path = (*parent, node.token_id)
            if self.names.setdefault((*name, nodes.epoch, node.node_id), path) is not path:
                raise Violation(f"node {node.node_id} of epoch {nodes.epoch} is named twice")
            if len(path) > sum(self.reach[name]):
                raise Violation(f"a node ends at {len(path)}, the window at {sum(self.reach[name])}")
            if node.proposal:
                entry = watched.session.params.seed, parent, node.token_id, node.draft_probs
                if entry[2:] not in self.proposals.get(entry[:2], ()):
                    raise Violation(f"{node} is no proposal drawn after {parent}")
                self.unsent.pop(entry, None)

    def on_ask(self, stream: Any, item: Any) -> None:
        """The coordinator sends an item."""
        name = stream, item.session, item.incarnation
        self._check_known(name, item)
        moves = self.sessions[stream.link.loop, item.session].moves
        if isinstance(item, Open):
            moves.opened(stream)
        elif isinstance(item, Close):
            moves.closed(stream)
        if isinstance(item, Commit):
            length, window = self.reach.get(name, (0, 0))
            self.reach[name] = max(length, item.committed_length), max(window, item.window)
        elif isinstance(item, Verification):
            watched = self.sessions[stream.link.loop, item.session]
            watched.check_requested(item)
            path = tuple(watched.session.committed)
            self.check_offer(watched.session.params.seed, path, item.draft_token_ids, item.draft_probs, item.parents)

    def _check_known(self, name: tuple, item: Any) -> None:
        """No item builds on tokens that this incarnation of its session was never sent."""
        start, end = span_of(item)
        if start > self.sent_length.get(name, 0):
            raise Violation(f"{item} builds on {start} tokens; {self.sent_length.get(name, 0)} were sent")
        self.sent_length[name] = max(self.sent_length.get(name, 0), end)

    def check_offer(
        self, seed: int, path: Path, draft_token_ids: Path, rows: tuple[DraftProbs, ...], parents: Path
    ) -> None:
        """Every draft token was proposed by the draft after its path, and has the distribution it was drawn from; or it
        continues known text, or is of the head for its position after the row of the newest commit, with all weight on
        itself."""
        paths, pairs = [path], self.pairs.union(pairwise(path))
        heads = self.of_heads.get((seed, path[:-1]), ())
        for index, token in enumerate(draft_token_ids):
            before = paths[parents[index] if parents else index]
            row = rows[index] if rows else None
            is_known = seed in self.guessing and ((before[-1], token) in pairs or (seed, token) in self.predicted)
            candidates = heads[len(before) - len(path) :][:1]
            is_of_head = any(token == candidate.token_id for head in candidates for candidate in head)
            is_guess = (is_known or is_of_head) and (row is None or row == point_mass(token))
            if not is_guess and (token, row) not in self.proposals.get((seed, before), ()):
                raise Violation(f"token {token} with {row} was not proposed after {before}")
            paths.append((*before, token))

    def deliver(self, stream: Any, answer: Any, hand_over: Callable[[], None]) -> None:
        """Hands an answer to its session. A stale one, or one of a replica that the text has left, changes nothing, and
        no node replaces another."""
        watched = self.sessions.get((stream.link.loop, answer.session))
        if watched is None:
            hand_over()
            return
        session, is_draft = watched.session, stream.process.traits.is_draft
        own = watched.moves.generation._draft if is_draft else watched.moves.generation._target
        if own.link is not stream.link or is_stale(session, is_draft, answer):
            before = state_of(session)
            hand_over()
            if state_of(session) != before:
                raise Violation(f"{answer} is stale and changed session {session.number}")
        elif isinstance(answer, Nodes):
            watched.arrived(answer, self.names_of(stream, answer))
            proposals = [(node, node.proposal) for node in session.tree.root.below() if node.proposal is not None]
            hand_over()
            if any(node.alive and node.proposal is not proposal for node, proposal in proposals):
                raise Violation(f"{answer} replaced a proposal child of session {session.number}")
        else:
            if isinstance(answer, VerificationResult):
                watched.table = stream.process.traits.table
                self._on_head_nodes(watched, answer)
            hand_over()

    def names_of(self, stream: Any, nodes: Nodes) -> list[Path]:
        """The true paths of nodes, independent of the session."""
        name = stream, nodes.session, nodes.incarnation, nodes.epoch
        return [self.names[*name, node.node_id] for node in nodes.nodes]

    def on_scores(self, client: Client, found: PromptLogprobs) -> None:
        """A client has read log-probabilities of its prompt: those of the model, with the numerics it was told of."""
        prompt, start, end = client.order.prompt, found.first_index, found.end_index
        asked = PromptRows(start, prompt[start:end], client.order.prompt_logprobs or 0)
        table = table_of(self.table, client.profile)
        expected = prompt_scores(table, asked, [prompt[:index] for index in range(start, end)])
        if found._replace(token_ids=list(found.token_ids)) != expected:
            raise Violation(f"a client reads of its prompt {found}, not {expected}")
        self.scored_count += end - start

    def on_tokens(self, client: Client) -> None:
        """A client has read tokens: those of plain decoding, with the numerics that it was told of."""
        order, length = client.order, len(client.output)
        if order.rule is not Rule.REJECTION:
            start, table = client.checked_count, table_of(self.table, client.profile)
            before = [*order.prompt, *client.output[:start]]
            expected = plain_text(table, order.params(0), before, len(order.prompt) + length)
            if [*order.prompt, *client.output] != expected:
                raise Violation(f"a client reads {client.output}, plain decoding goes on {expected[len(before) :]}")
        client.checked_count = length
