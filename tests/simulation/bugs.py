"""The planted protocol bugs: one function or method replaced at a time, as a slip of the hand might change it.

Each takes the real one and gives the one with the bug; names are looked up where the bug is planted, so a function that
is renamed fails loudly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from coordinator import rejection
from coordinator.decode_loop import Generation
from draft_service import drafter
from draft_service.drafter import DraftedSession, Drafter
from specdec.engine.kv_cache import KVCache
from specdec.protocol import session as session_module
from specdec.protocol.actions import ToDraft
from specdec.protocol.growth import Growth
from specdec.protocol.noise import Lane
from specdec.protocol.report import Delta
from specdec.protocol.session import Session
from specdec.protocol.states import DraftEvent
from specdec.protocol.tree import DraftTree
from specdec.protocol.types import TokenKind
from specdec.replica.sessions import HeldSession, HeldSessions
from target_service.room import GrowingSessions
from target_service.verifier import Verifier
from tests.simulation.planting import Bug, SourceBug


def after(effect: Callable[..., Any]) -> Callable[[Callable], Callable]:
    """The real method, and then `effect(self)`."""

    def made(real: Callable) -> Callable:
        def mutant(self: Any, *arguments: Any) -> Any:
            result = real(self, *arguments)
            effect(self)
            return result

        return mutant

    return made


def before(effect: Callable[..., Any]) -> Callable[[Callable], Callable]:
    """`effect(self)`, and then the real method."""

    def made(real: Callable) -> Callable:
        def mutant(self: Any, *arguments: Any) -> Any:
            effect(self)
            return real(self, *arguments)

        return mutant

    return made


def instead(other: Callable) -> Callable[[Callable], Callable]:
    """Something else."""
    return lambda real: other


def add_to(name: str, amount: int) -> Callable[[Any], None]:
    """Changes a count."""
    return lambda owner: setattr(owner, name, getattr(owner, name) + amount)


def short_as(**changed: Callable[[Session], int]) -> Callable[[Callable], Callable]:
    """A Short of the target is read with other numbers."""

    def made(real: Callable) -> Callable:
        def mutant(self: Session, short: Any) -> Any:
            if self.in_flight is None:
                return []
            return real(self, replace(short, **{name: value(self) for name, value in changed.items()}))

        return mutant

    return made


def asks_anew(real: Callable) -> Callable:
    """A verification that is sent again offers what is in hand by then."""

    def mutant(self: Session, draft_token_ids: Any, rows: Any) -> Any:
        if self.in_flight is None:
            return real(self, draft_token_ids, rows)
        self.in_flight = None
        return self._verify_now()

    return mutant


def offers_more(real: Callable) -> Callable:
    """One token more than planned."""

    def mutant(self: Session) -> Any:
        plan = self.plan
        self.plan = replace(plan, draft_length_max=plan.draft_length_max + 1)
        try:
            return real(self)
        finally:
            self.plan = plan

    return mutant


def late_suffix(real: Callable) -> Callable:
    """The suffix begins one token too late."""

    def mutant(*arguments: Any) -> Any:
        extends, suffix = real(*arguments)
        return extends, suffix[1:] or suffix

    return mutant


def next_token(kind: TokenKind, chosen: Callable[..., int | None]) -> Callable[[Callable], Callable]:
    """The token after the accepted ones is another, `chosen(draft tokens, evidence, accepted count)`."""

    def made(real: Callable) -> Callable:
        def mutant(rule: Any, draft_token_ids: Any, rows: Any, evidence: Any, draws: Any) -> Any:
            verdict = real(rule, draft_token_ids, rows, evidence, draws)
            other = chosen(draft_token_ids, evidence, verdict.accepted_count) if verdict.next_kind is kind else None
            return verdict if other is None else verdict._replace(next_token_id=other)

        return mutant

    return made


def emitted(change: Callable[[Delta], Delta]) -> Callable[[Callable], Callable]:
    """Deltas leave changed."""
    return lambda real: lambda self, event: real(self, change(event) if isinstance(event, Delta) else event)


def attached(is_meant: Callable[..., bool]) -> Callable[[Callable], Callable]:
    """A node becomes its parent's proposal child where it is meant to be."""

    def made(real: Callable) -> Callable:
        def mutant(parent: Any, node: Any) -> Any:
            place = real(parent, node)
            if is_meant(node):
                parent.proposal, parent.row = place, node.row
            return place

        return mutant

    return made


def by_position(real: Callable) -> Callable:
    """Every known parent is taken for the root."""

    def mutant(self: DraftTree, *name: int) -> Any:
        parent, length = real(self, *name)
        return (None, len(self.committed)) if 0 < length <= len(self.committed) else (parent, length)

    return mutant


def nothing_dies(real: Callable) -> Callable:
    """Places beside the committed path stay alive."""

    def mutant(self: DraftTree, token_id: int) -> Any:
        places = list(self.root.below())
        child = real(self, token_id)
        for place in places:
            place.alive = True
        return child

    return mutant


def root_stays(is_meant: Callable[[bool], bool]) -> Callable[[Callable], Callable]:
    """The root stays where it was."""

    def made(real: Callable) -> Callable:
        def mutant(self: DraftTree, token_ids: Any) -> bool:
            root, inside = self.root, real(self, token_ids)
            if is_meant(inside):
                self.root = root
            return inside

        return mutant

    return made


def believe_told(session: Session) -> None:
    """The draft is taken to know the text although it was opened anew."""
    if session._draft_known_length == 0 and session.draft_incarnation > 1:
        session._draft_known_length = len(session.committed) - 1


def wait_ends_in_nothing(self: Session, wait_index: int) -> list:
    """The end of a wait is noted, and nothing is sent."""
    if self.waiting and wait_index == self.wait_index:
        self._draft(DraftEvent.WAIT_EXPIRED)
    return []


FENCES = (
    Bug(
        "evidence of another round is accepted",
        Session,
        "expects",
        instead(lambda self, answer: self.in_flight and answer.incarnation == self.in_flight.incarnation),
    ),
    Bug(
        "evidence of another incarnation is accepted",
        Session,
        "expects",
        instead(lambda self, answer: self.in_flight and answer.round_index == self.in_flight.round_index),
    ),
    Bug(
        "the draft's answers are not fenced",
        Session,
        "_hears_draft",
        instead(lambda self, incarnation: self.has_draft and not self.finished),
    ),
    Bug(
        "a late Short of the target is answered again",
        Session,
        "on_target_short",
        short_as(incarnation=lambda session: session.in_flight.incarnation),
    ),
    Bug(
        "the index of a wait is ignored",
        Session,
        "on_wait_expired",
        lambda real: lambda self, wait_index: real(self, self.wait_index),
    ),
    SourceBug(
        "a replica carries out items of an older incarnation",
        HeldSessions,
        "find",
        "return held if held.opened.incarnation == item.incarnation else None",
        "return held",
    ),
    SourceBug(
        "an older Open replaces a newer session",
        HeldSessions,
        "open",
        "held.opened.incarnation >= item.incarnation",
        "False",
    ),
    SourceBug("a feed runs though its session moved on", HeldSessions, "_feed", "lane.feed is feed", "True"),
    SourceBug(
        "a round asked again is answered from other noise",
        Verifier,
        "_verify",
        "EvidenceRequest(held.opened.law, item.round_index,",
        "EvidenceRequest(held.opened.law, item.round_index + held.opened.incarnation - 1,",
    ),
)

ROUNDS = (
    Bug("the round index does not advance", Session, "_commit", after(add_to("round_index", -1))),
    Bug(
        "a Short is answered by the assumed length",
        Session,
        "on_target_short",
        short_as(known_length=lambda session: len(session.committed)),
    ),
    Bug("after a Short the round is asked with other tokens", Session, "_send_verification", asks_anew),
    Bug(
        "the target is believed to know the newest tokens",
        Session,
        "_commit",
        after(lambda session: setattr(session, "_target_known_length", len(session.committed) - 1)),
    ),
    Bug("the committed suffix begins one too late", session_module, "catch_up", late_suffix),
    Bug("one draft token too many", Session, "_verify_now", offers_more),
    Bug(
        "the bonus token is skipped",
        rejection,
        "decide",
        next_token(TokenKind.BONUS, lambda drafted, evidence, accepted: drafted[-1] if drafted else None),
    ),
    Bug(
        "a rejected token is replaced by its neighbour's correction",
        rejection,
        "decide",
        next_token(
            TokenKind.CORRECTION, lambda drafted, evidence, accepted: evidence.replacement_token_ids[accepted + 1]
        ),
    ),
    Bug(
        "the draws of the test share the noise of the replacement",
        rejection,
        "uniform",
        lambda real: lambda seed, lane, round_index, position: real(seed, Lane.NEXT, round_index, position),
    ),
    Bug(
        "rows are shifted by one",
        DraftTree,
        "proposal_rows",
        instead(lambda self, length: tuple(place.row for place in self.proposal_path(length) if place.row)),
    ),
    Bug(
        "the last token of a round is not emitted",
        Generation,
        "_emit",
        emitted(lambda delta: delta._replace(token_ids=delta.token_ids[:-1])),
    ),
    Bug(
        "a delta is numbered by what follows it",
        Generation,
        "_emit",
        emitted(lambda delta: delta._replace(first_output_index=delta.first_output_index + len(delta.token_ids))),
    ),
    Bug(
        "the loss of the target goes unnoticed",
        Generation,
        "on_down",
        lambda real: lambda self, replica, reason: real(self, replica, reason) if replica is self._draft else None,
    ),
)

TREE = (
    Bug("a second proposal child replaces the first", DraftTree, "_attach", attached(lambda node: node.proposal)),
    Bug("a branch child is offered", DraftTree, "_attach", attached(lambda node: not node.proposal)),
    Bug("a late node is filed by position, not by path", DraftTree, "_parent", by_position),
    Bug("dead places stay usable", DraftTree, "_descend", nothing_dies),
    Bug("a commit does not re-root", DraftTree, "commit", root_stays(lambda inside: True)),
    Bug("a commit outside the tree keeps it", DraftTree, "commit", root_stays(lambda inside: not inside)),
    Bug(
        "late nodes are not used",
        DraftTree,
        "add",
        lambda real: (
            lambda self, epoch, root_length, node: (
                None if root_length < len(self.committed) else real(self, epoch, root_length, node)
            )
        ),
    ),
    Bug("a draft that comes back finds its old tree", DraftTree, "clear", instead(lambda self: None)),
    Bug(
        "a draft that comes back finds its old incarnation",
        Session,
        "on_draft_up",
        before(lambda session: setattr(session, "draft_incarnation", 0)),
    ),
    Bug("a draft that comes back is not told the text", Session, "_commit_to_draft", before(believe_told)),
    Bug(
        "a lost draft is waited for",
        Session,
        "on_draft_down",
        instead(lambda self: self._verify_when_ready() if self.waiting else []),
    ),
    Bug("a draft that comes back is not used", Generation, "on_up", instead(lambda self, replica: None)),
    Bug(
        "the draft is not told of the end",
        Session,
        "end",
        lambda real: lambda self: [action for action in real(self) if not isinstance(action, ToDraft)],
    ),
)

DRAFT = (
    SourceBug("a restart keeps its epoch", Growth, "restart", "self.epoch = next(self._epochs)", "self.epoch = 1"),
    SourceBug(
        "the likeliest child is offered, not the drawn one",
        Growth,
        "evaluated",
        "guesses[0].token_id, True, row",
        "max(guesses, key=lambda guess: guess.confidence).token_id, True, row",
    ),
    SourceBug(
        "an unlikely drawn child is not sent",
        Drafter,
        "_keep",
        "held.grown += nodes",
        "held.grown += [node for node in nodes if node.row is None or node.token_id == min(node.row.token_ids)]",
    ),
    SourceBug(
        "all places of an epoch share a draw",
        Drafter,
        "_evaluate",
        "NoiseLane.DRAFT, epoch, node)",
        "NoiseLane.DRAFT, epoch, 1)",
    ),
    SourceBug(
        "the window is ignored",
        DraftedSession,
        "reach",
        "len(self.tokens) + self.window",
        "len(self.tokens) + self.window + 1",
    ),
    SourceBug("nodes are sent twice", Drafter, "_send", "held.grown = []", "pass"),
    SourceBug("an Extend leaves the tree as it was", Drafter, "work", "self._stop(held)", "pass"),
)

CACHE = (
    SourceBug(
        "the cache is not truncated", HeldSessions, "submit", "self.engine.cache.truncate(lane.table, start)", "pass"
    ),
    SourceBug("what a lane was fed is not noted", HeldSessions, "submit", "lane.fed = wanted", "pass"),
    SourceBug(
        "a stale cache is believed",
        HeldSession,
        "agreement",
        "while length < end and lane.fed[length] == wanted[length]:",
        "while length < end:",
    ),
    SourceBug(
        "a shared block is written without a copy",
        KVCache,
        "prepare_write",
        "self._holders[table.block_ids[index]] > 1",
        "False",
    ),
    SourceBug("a fork does not count as a holder", KVCache, "fork", "self._holders[block_id] += 1", "pass"),
    SourceBug(
        "a block copied is not filled", KVCache, "_copy_on_write", "self._storage.copy_block(shared, own)", "pass"
    ),
    SourceBug("Close is not honoured", HeldSessions, "close", "self._drop((stream, item.session))", "pass"),
    SourceBug("sessions of a lost stream are kept", HeldSessions, "close_stream", "self._drop(key)", "pass"),
    SourceBug(
        "branches outlive their session",
        HeldSessions,
        "_drop",
        "for lane in held.lanes:",
        "for lane in held.lanes[:1]:",
    ),
)

ROOM = (
    SourceBug("who adopts a block does not hold it", KVCache, "adopt", "self._holders[block_id] += 1", "pass"),
    SourceBug("an adopted block can be taken", KVCache, "adopt", "self._kept.pop(block_id, None)", "pass"),
    SourceBug("a block is published one too early", GrowingSessions, "_publish", "length)", "lane.table.length + 7)"),
    SourceBug("an evicted session is taken for cached", KVCache, "vacate", "table.length, ", "_, "),
    SourceBug("the feed of an evicted session runs", GrowingSessions, "_evict", "lane.feed = None", "pass"),
    SourceBug(
        "what an evicted session was asked is forgotten",
        GrowingSessions,
        "_evict",
        "if lane.work is not None:",
        "if False:",
    ),
    SourceBug("who waits for room is forgotten", Verifier, "before_step", "self._sessions.take_turn()", "0.0"),
    SourceBug("who has left is waited for", GrowingSessions, "_drop", "self._waiting.discard(held)", "pass"),
    SourceBug(
        "who found no room never looks again", GrowingSessions, "_reopen", "free_count <= self._tried[1]", "True"
    ),
)

TIMES = (
    SourceBug("a step is held for ever", Verifier, "before_step", "return hold_s", "return 0.001"),
    Bug("the end of a wait changes nothing", Session, "on_wait_expired", instead(wait_ends_in_nothing)),
    Bug(
        "nodes do not end a wait",
        Session,
        "_verify_when_ready",
        lambda real: lambda self: [] if self.waiting else real(self),
    ),
    Bug(
        "what a policy switches on again is not told the text",
        Session,
        "_commit_to_draft",
        after(lambda session: add_to("_draft_known_length", not session.plan.window)(session)),
    ),
)

BUGS = (*FENCES, *ROUNDS, *TREE, *DRAFT, *CACHE, *ROOM, *TIMES)

# Not a bug: a lane is only where work goes on cheapest. What it holds is compared with every path that is fed to it, so
# one chosen badly costs the re-feeding of a few tokens, and nothing else can be seen of it.
HARMLESS = (
    SourceBug(
        "a path goes on in a lane that holds another",
        drafter,
        "lane_for",
        "is_end = lane.table.length == agreed == length",
        "is_end = lane.table.length == length",
    ),
)
