"""The planted protocol bugs: one function or method replaced at a time, as a slip of the hand might change it.

Each takes the real one and gives the one with the bug; names are looked up where the bug is planted, so a function that
is renamed fails loudly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specdec.coordinator.generation import Generation
from specdec.decoding.verification import VerificationRequest
from specdec.draft_service import drafter
from specdec.draft_service.drafter import Drafter
from specdec.draft_service.session import DraftSession
from specdec.engine.cache.kv_cache import KVCache
from specdec.engine.scheduling.runner import StepRunner
from specdec.protocol import offer as offer_module
from specdec.protocol import rejection
from specdec.protocol import session as session_module
from specdec.protocol.events import NOTHING_READY, FromDraft, FromTarget, Ready, TargetLost
from specdec.protocol.growth import GrowingTree
from specdec.protocol.items import Close, Nodes
from specdec.protocol.limits import UINT32_MAX
from specdec.protocol.noise import Lane
from specdec.protocol.proposers import NgramProposer, PredictionProposer
from specdec.protocol.report import Delta
from specdec.protocol.session import Session
from specdec.protocol.states import DraftEvent
from specdec.protocol.suffix_store import SuffixProposer, SuffixStore
from specdec.protocol.tree import ReceivedTree
from specdec.protocol.types import DraftNode, DraftProbs, TokenKind
from specdec.replica.handler import ItemHandler
from specdec.target_service import heads as heads_module
from specdec.target_service.admission import Admission
from specdec.target_service.session import TargetSession
from specdec.target_service.verifier import Verifier
from tests.simulation.model import VOCABULARY_SIZE, TokenStorage
from tests.simulation.move_bugs import MOVES
from tests.simulation.planting import Bug, after, instead, keeping


def before(effect: Callable[..., Any]) -> Callable[[Callable], Callable]:
    """`effect(self)`, and then the real method."""

    def made(real: Callable) -> Callable:
        def mutant(self: Any, *arguments: Any) -> Any:
            effect(self)
            return real(self, *arguments)

        return mutant

    return made


def add_to(name: str, amount: int) -> Callable[[Any], None]:
    """Changes a count."""
    return lambda owner: setattr(owner, name, getattr(owner, name) + amount)


def short_as(**changed: Callable[[Session], int]) -> Callable[[Callable], Callable]:
    """A MissingTokens of the target is read with other numbers."""

    def made(real: Callable) -> Callable:
        def mutant(self: Session, event: Any) -> Any:
            if self.in_flight is None:
                return NOTHING_READY
            item = replace(event.item, **{name: value(self) for name, value in changed.items()})
            return real(self, FromTarget(item))

        return mutant

    return made


def asks_anew(real: Callable) -> Callable:
    """A verification that is sent again offers the draft tokens of that moment."""

    def mutant(self: Session, so_far: Ready) -> Any:
        if self.in_flight is None:
            return real(self, so_far)
        self.in_flight = None
        return self._verify_now(so_far)

    return mutant


def offers_more(real: Callable) -> Callable:
    """One token more than planned."""

    def mutant(self: Session, *so_far: Ready) -> Any:
        plan = self.plan
        self.plan = replace(plan, draft_length_max=plan.draft_length_max + 1)
        try:
            return real(self, *so_far)
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
    """The token after the accepted ones is another, `chosen(draft tokens, sampler output, last row)`."""

    def made(real: Callable) -> Callable:
        def mutant(rule: Any, draft_token_ids: Any, rows: Any, output: Any, draws: Any, parents: Any) -> Any:
            verdict = real(rule, draft_token_ids, rows, output, draws, parents)
            other = chosen(draft_token_ids, output, verdict.last_row) if verdict.next_kind is kind else None
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
            child = real(parent, node)
            if is_meant(node):
                parent.proposal, parent.draft_probs = child, node.draft_probs
            return child

        return mutant

    return made


def by_position(real: Callable) -> Callable:
    """Every known parent counts as the root."""

    def mutant(self: ReceivedTree, *name: int) -> Any:
        parent, length = real(self, *name)
        return (None, len(self.committed)) if 0 < length <= len(self.committed) else (parent, length)

    return mutant


def nothing_dies(real: Callable) -> Callable:
    """Nodes beside the committed path stay alive."""

    def mutant(self: ReceivedTree, token_id: int) -> Any:
        nodes = list(self.root.below())
        child = real(self, token_id)
        for node in nodes:
            node.alive = True
        return child

    return mutant


def root_stays(is_meant: Callable[[bool], bool]) -> Callable[[Callable], Callable]:
    """The root stays where it was."""

    def made(real: Callable) -> Callable:
        def mutant(self: ReceivedTree, token_ids: Any) -> bool:
            root, inside = self.root, real(self, token_ids)
            if is_meant(inside):
                self.root = root
            return inside

        return mutant

    return made


def assume_known(session: Session) -> None:
    """The draft is assumed to know the text although it was opened anew."""
    if session._draft_known_length == 0 and session.draft_incarnation > 1:
        session._draft_known_length = len(session.committed) - 1


def wait_ends_in_nothing(self: Session, event: Any) -> Ready:
    """The end of a wait is noted, and nothing is sent."""
    if self.waiting and event.wait_index == self.wait_index:
        self._draft(DraftEvent.WAIT_EXPIRED)
    return NOTHING_READY


def unfenced(real: Callable) -> Callable:
    """Whatever incarnation an answer of the draft is of, it counts."""

    def mutant(self: Session, event: Any) -> Any:
        item, number = event.item, self.draft_incarnation
        own = item._replace(incarnation=number) if isinstance(item, Nodes) else replace(item, incarnation=number)
        return real(self, FromDraft(own))

    return mutant


def only_the_first_draft(real: Callable) -> Callable:
    """A draft that comes later is told nothing."""
    return lambda self, event: NOTHING_READY if event.is_late else real(self, event)


def fed(effect: Callable[[Any, Any], None]) -> Callable[[Callable], Callable]:
    """The target's feed is changed: `effect(feed, session)`."""

    def made(real: Callable) -> Callable:
        def mutant(self: Verifier, session: TargetSession) -> None:
            real(self, session)
            effect(session.feed, session)

        return mutant

    return made


def is_always_current(feed: Any) -> None:
    """The feed runs after its session moved on."""
    feed.is_current = lambda: True


def with_other_noise(feed: Any, session: TargetSession) -> None:
    """A session opened again draws from the noise of another round."""
    feed.payload = replace(feed.payload, round_index=feed.payload.round_index + session.opened.incarnation - 1)


def swapped_paths(feed: Any, session: TargetSession) -> None:
    """The last two draft tokens of a tree lie in each other's cells."""
    if len(feed.paths) > 1:
        *others, first, second = feed.paths
        feed.paths = [*others, [*first[:-1], second[-1]], [*second[:-1], first[-1]]]


def of_the_parent(real: Callable) -> Callable:
    """A drawn token has the distribution of the token before it."""

    def mutant(remote: Any, *arguments: Any) -> Any:
        nodes = real(remote, *arguments)
        for node in nodes:
            before = remote.parent and remote.parent.draft_probs
            node.draft_probs = before or node.draft_probs
        return nodes

    return mutant


def last_drawn_first(real: Callable) -> Callable:
    def planted(remote: Any, *arguments: Any) -> Any:
        drawn, remote.drawn = remote.drawn, remote.drawn[::-1]
        try:
            return real(remote, *arguments)
        finally:
            remote.drawn = drawn

    return planted


def without_parents(real: Callable) -> Callable:
    """The shape of the tree is lost."""

    def mutant(self: Session, *so_far: Ready) -> Any:
        self.offer = self.offer._replace(parents=())
        return real(self, *so_far)

    return mutant


def likeliest_offered(real: Callable) -> Callable:
    """The likeliest child is offered with the draft distribution of another."""

    def mutant(self: GrowingTree, node: Any, names: Any, guesses: Any, row: Any, *cell: int) -> list[DraftNode]:
        sent = real(self, node, names, guesses, row, *cell)
        return [sent[0]._replace(token_id=max(guesses, key=lambda guess: guess[1])[0]), *sent[1:]]

    return mutant


def unlikely_unsent(real: Callable) -> Callable:
    """The drawn token decides whether it is sent."""

    def mutant(self: Drafter, session: Any, *counts: int) -> None:
        session.grown[:] = [
            n for n in session.grown if n.draft_probs is None or n.token_id == min(n.draft_probs.token_ids)
        ]
        real(self, session, *counts)

    return mutant


def sent_twice(real: Callable) -> Callable:
    """Sent nodes are sent again with the next step."""

    def mutant(self: Drafter, session: Any, *counts: int) -> None:
        grown = list(session.grown)
        real(self, session, *counts)
        session.grown[:] = grown

    return mutant


def held_beside_the_tree(self: Drafter, session: Any, item: Any) -> None:
    """An Extend adds its tokens, and the tree grows on where it was."""
    session.tokens[item.start_position :] = item.token_ids


def of_another_path(real: Callable) -> Callable:
    """The second node of a step sees the ancestors of the first, if it has as many."""

    def mutant(self: Drafter, *arguments: Any) -> Any:
        feed = real(self, *arguments)
        if len(feed.paths) > 1 and len(feed.paths[0]) == len(feed.paths[1]):
            feed.paths[1] = [*feed.paths[0][:-1], feed.paths[1][-1]]
        return feed

    return mutant


def moved_one_by_one(real: Callable) -> Callable:
    """Cells that are in each other's way overwrite each other."""

    def mutant(self: KVCache, table: Any, sources: Any, destinations: Any) -> None:
        for source, destination in zip(sources, destinations):
            real(self, table, [source], [destination])

    return mutant


def unheld(real: Callable) -> Callable:
    """Matched blocks have one holder too few."""

    def mutant(self: KVCache, table: Any, token_ids: Any) -> int:
        length = real(self, table, token_ids)
        for block_id in table.block_ids:
            self._holders[block_id] -= 1
        return length

    return mutant


def still_evictable(real: Callable) -> Callable:
    """Matched blocks stay evictable."""

    def mutant(self: KVCache, table: Any, token_ids: Any) -> int:
        evictable = dict(self._evictable)
        length = real(self, table, token_ids)
        self._evictable |= {block_id: None for block_id in table.block_ids if block_id in evictable}
        return length

    return mutant


def never_again(real: Callable) -> Callable:
    """A session that once lacked blocks is not tried again."""

    def mutant(self: Admission, session: Any) -> bool:
        return (self._tried is None or self._tried[0] is not session) and real(self, session)

    return mutant


def placed_lowest(self: DraftSession, node: Any) -> None:
    """A node takes the lowest free cell, whatever its position."""
    node.cell = next(cell for cell in itertools.count(self.table.length) if cell not in self.nodes)
    self.nodes[node.cell] = node


def heads_after_row(chosen: Callable[[VerificationRequest, int], int]) -> Callable[[Callable], Callable]:
    """The heads of another row are read, `chosen(request, row)`."""
    return lambda real: (
        lambda requests, outputs: {
            index: chosen(requests[index], row) for index, row in real(requests, outputs).items()
        }
    )


def one_head_late(real: Callable) -> Callable:
    """The second head's tokens stand where the first head's belong."""
    return lambda *arguments: [run._replace(token_ids=run.token_ids[1:]) for run in real(*arguments)]


def filed_before(real: Callable) -> Callable:
    """Nodes of a feature head stand one position before their own; those of a draft where they belong."""
    return lambda self, epoch, length, *more: real(self, epoch, length - (epoch < 0), *more)


def head_draws_reversed(real: Callable) -> Callable:
    """The siblings that a feature head drew are in hand in the order of the last draws."""

    def mutant(self: Session, *arguments: Any) -> None:
        real(self, *arguments)
        for node in self.tree.root.below():
            node.drawn.reverse()

    return mutant


def older_heads_kept(real: Callable) -> Callable:
    """A round without proposals of heads offers those of the round before."""
    kept: dict[int, list] = {}

    def mutant(self: Session, *so_far: Ready) -> Any:
        if self._head_runs or not self.round_index:
            kept[self.number] = self._head_runs
        self._head_runs = kept[self.number]
        return real(self, *so_far)

    return mutant


def forgets_the_text_alone(self: SuffixStore) -> None:
    """The places of a forgotten text stay."""
    share = max((self._common, *self._shares.values()), key=lambda share: share.token_count)
    text = next(iter(share.texts.values()))
    share.give(text)
    del self._texts[text.number]
    self._token_count -= len(text.token_ids)


def ends_in(token_id: int) -> Callable[[Callable], Callable]:
    """One more token ends every run."""
    return lambda real: (
        lambda self, committed: [run._replace(token_ids=(*run.token_ids, token_id)) for run in real(self, committed)]
    )


def takes_its_runs_for_text(real: Callable) -> Callable:
    """The tokens of a run are added to the text that it was found for."""

    def mutant(self: Any, committed: list[int]) -> Any:
        runs = real(self, committed)
        committed += [run.token_ids[0] for run in runs[:1]]
        return runs

    return mutant


FENCES = (
    Bug(
        "a result of another round is accepted",
        Session,
        "expects",
        instead(lambda self, answer: self.in_flight and answer.incarnation == self.in_flight.incarnation),
    ),
    Bug(
        "a result of another incarnation is accepted",
        Session,
        "expects",
        instead(lambda self, answer: self.in_flight and answer.round_index == self.in_flight.round_index),
    ),
    Bug(
        "the draft's answers are not fenced",
        Session,
        "_on_draft_item",
        unfenced,
    ),
    Bug(
        "a late MissingTokens of the target is answered again",
        Session,
        "_on_target_item",
        short_as(incarnation=lambda session: session.in_flight.incarnation),
    ),
    Bug(
        "a replica carries out items of an older incarnation",
        ItemHandler,
        "_find",
        lambda real: lambda self, stream, item: self.sessions.get((stream, item.session)) or real(self, stream, item),
    ),
    Bug(
        "an older Open replaces a newer session",
        ItemHandler,
        "_end",
        lambda real: lambda self, stream, item: real(self, stream, replace(item, incarnation=UINT32_MAX)),
    ),
    Bug("a feed runs though its session moved on", Verifier, "_feed", fed(lambda feed, _: is_always_current(feed))),
    Bug("a round requested again is answered from other noise", Verifier, "_feed", fed(with_other_noise)),
)

ROUNDS = (
    Bug("the round index does not advance", Session, "_commit", after(add_to("round_index", -1))),
    Bug(
        "a MissingTokens is answered by the assumed length",
        Session,
        "_on_target_item",
        short_as(known_length=lambda session: len(session.committed)),
    ),
    Bug("after a MissingTokens the round is requested with other tokens", Session, "_send_verification", asks_anew),
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
        next_token(TokenKind.BONUS, lambda drafted, output, row: drafted[row - 1] if row else None),
    ),
    Bug(
        "a rejected token is replaced by its neighbour's recovered token",
        rejection,
        "decide",
        next_token(TokenKind.RECOVERED, lambda drafted, output, row: output.recovered_token_ids[row + 1]),
    ),
    Bug(
        "the draws of the test share the noise of the recovered token",
        rejection,
        "uniform",
        lambda real: lambda seed, lane, round_index, position: real(seed, Lane.NEXT, round_index, position),
    ),
    Bug(
        "draft distributions are shifted by one",
        offer_module,
        "_drawn",
        of_the_parent,
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
        "take",
        lambda real: (
            lambda self, event, byte_count=0: None if isinstance(event, TargetLost) else real(self, event, byte_count)
        ),
    ),
)

TREE = (
    Bug("a second proposal child replaces the first", ReceivedTree, "_attach", attached(lambda node: node.proposal)),
    Bug("a branch child is offered", ReceivedTree, "_attach", attached(lambda node: not node.proposal)),
    Bug("a late node is filed by position, not by path", ReceivedTree, "_parent", by_position),
    Bug("dead nodes stay usable", ReceivedTree, "_descend", nothing_dies),
    Bug("a commit does not re-root", ReceivedTree, "commit", root_stays(lambda inside: True)),
    Bug("a commit outside the tree keeps it", ReceivedTree, "commit", root_stays(lambda inside: not inside)),
    Bug(
        "late nodes are not used",
        ReceivedTree,
        "add",
        lambda real: (
            lambda self, epoch, root_length, node: (
                None if root_length < len(self.committed) else real(self, epoch, root_length, node)
            )
        ),
    ),
    Bug("a draft that comes back finds its old tree", ReceivedTree, "clear", instead(lambda self: None)),
    Bug(
        "a draft that comes back finds its old incarnation",
        Session,
        "_open_on_draft",
        before(lambda session: setattr(session, "draft_incarnation", 0)),
    ),
    Bug("a draft that comes back does not receive the text", Session, "_commit_to_draft", before(assume_known)),
    Bug(
        "a lost draft is waited for",
        Session,
        "_on_draft_lost",
        instead(lambda self, event: self._verify_when_ready() if self.waiting else NOTHING_READY),
    ),
    Bug("a draft that comes back is not used", Session, "_on_draft_found", only_the_first_draft),
    Bug(
        "the draft does not receive the end",
        Session,
        "_on_end",
        lambda real: lambda self, *arguments, **more: real(self, *arguments, **more)._replace(to_draft=()),
    ),
)

DRAFT = (
    Bug("a restart keeps its epoch", GrowingTree, "restart", after(lambda growth: setattr(growth, "epoch", 1))),
    Bug("the likeliest child is offered, not the drawn one", GrowingTree, "evaluated", likeliest_offered),
    Bug("an unlikely drawn child is not sent", Drafter, "_send", unlikely_unsent),
    Bug(
        "all nodes of an epoch share a draw",
        drafter,
        "uniform_bits",
        lambda real: lambda seed, lane, epoch, node: real(seed, lane, epoch, 1),
    ),
    Bug(
        "the window is ignored",
        GrowingTree,
        "take",
        lambda real: lambda self, count, reach, is_chain: real(self, count, reach + 1, is_chain),
    ),
    Bug("nodes are sent twice", Drafter, "_send", sent_twice),
    Bug("an Extend leaves the tree as it was", Drafter, "extend", instead(held_beside_the_tree)),
)

CACHE = (
    Bug("the cache is not truncated", KVCache, "truncate", instead(lambda self, table, length: None)),
    Bug("cells copied are not filled", TokenStorage, "copy_slots", instead(lambda self, sources, destinations: None)),
    Bug(
        "Close is not honoured",
        ItemHandler,
        "_end",
        lambda real: lambda self, stream, item: not isinstance(item, Close) and real(self, stream, item),
    ),
    Bug("sessions of a lost stream are kept", ItemHandler, "close_stream", instead(lambda self, stream: None)),
    Bug(
        "a closed session keeps its blocks",
        Drafter,
        "close",
        instead(lambda self, session: self._growing.pop(session, None) and None),
    ),
    Bug("a node sees the path of another", Drafter, "_evaluate", of_another_path),
    Bug("cells are moved one after the other", KVCache, "move", moved_one_by_one),
    Bug("cells of nodes left behind are lost", DraftSession, "_free", instead(lambda self, cells: None)),
)

SPACE = (
    Bug("a matched block has no holder", KVCache, "match_prefix", unheld),
    Bug("a matched block is evictable", KVCache, "match_prefix", still_evictable),
    Bug(
        "a block is cached one too early",
        KVCache,
        "cache_prefix",
        lambda real: lambda self, table, token_ids, length: real(self, table, token_ids, table.length + 7),
    ),
    Bug("a preempted session counts as cached", KVCache, "free", keeping("length", lambda self, table: table)),
    Bug("the feed of a preempted session runs", Admission, "_preempt", keeping("feed", lambda self, session: session)),
    Bug(
        "the request of a preempted session is forgotten",
        Admission,
        "_preempt",
        lambda real: lambda self, session: (real(self, session), self.waiting.discard(session))[1],
    ),
    Bug("a waiting session is forgotten", Admission, "next_waiting", instead(lambda self: None)),
    Bug("a session without space is never tried again", Admission, "_reopen", never_again),
)

TIMES = (
    Bug(
        "a step is delayed for ever",
        Verifier,
        "next_step",
        lambda real: lambda self: replace(real(self), delay_s=0.001),
    ),
    Bug("the end of a wait changes nothing", Session, "_on_wait_expired", instead(wait_ends_in_nothing)),
    Bug(
        "nodes do not end a wait",
        Session,
        "_verify_when_ready",
        lambda real: lambda self, *so_far: NOTHING_READY if self.waiting else real(self, *so_far),
    ),
    Bug(
        "a draft switched on again does not receive the text",
        Session,
        "_commit_to_draft",
        after(lambda session: add_to("_draft_known_length", not session.plan.window)(session)),
    ),
)

PATHS = (
    Bug("siblings are tested with one draw", rejection, "SIBLING_SHIFT", instead(0)),
    Bug(
        "the last drawn sibling is offered first",
        offer_module,
        "_drawn",
        last_drawn_first,
    ),
    Bug("a tree is sent as a chain", Session, "_send_verification", without_parents),
    Bug("accepted rows stay in their cells", KVCache, "move", instead(lambda *arguments: None)),
    Bug(
        "accepted rows are taken from other cells",
        TargetSession,
        "_followed",
        lambda real: lambda self: list(range(len(real(self)))),
    ),
    Bug("two paths are taken for one another", Verifier, "_feed", fed(swapped_paths)),
    Bug(
        "a guess is offered with the draft's distribution",
        offer_module,
        "point_mass",
        instead(lambda token: DraftProbs((token, token + 1), (1, 1))),
    ),
)

HEADS = (
    Bug(
        "the heads of the row before are offered",
        heads_module,
        "last_rows",
        heads_after_row(lambda request, row: max(0, row - 1)),
    ),
    Bug(
        "the heads after a rejected token are offered",
        heads_module,
        "last_rows",
        heads_after_row(lambda request, row: request.row_count - 1),
    ),
    Bug(
        "the target concludes with the draws of another round",
        heads_module,
        "conclude",
        lambda real: (
            lambda params, asked, output: real(params, replace(asked, round_index=asked.round_index + 1), output)
        ),
    ),
    Bug(
        "the target concludes with the draws of other positions",
        VerificationRequest,
        "base_position",
        instead(property(lambda request: len(request.committed) + 1)),
    ),
    Bug("the heads' tokens are offered one position too early", session_module, "head_runs", one_head_late),
    Bug("a feature head's nodes are filed one position too early", ReceivedTree, "take", filed_before),
    Bug("what a feature head drew is offered in another order", Session, "_take_head_nodes", head_draws_reversed),
    Bug("the heads of an older round are offered", Session, "_verify_now", older_heads_kept),
    Bug(
        "requests of a step have each other's hidden states",
        StepRunner,
        "_output_of",
        lambda real: lambda self, pieces, logits, hidden, found=None: real(self, pieces, logits, hidden[::-1], found),
    ),
)

SOURCES = (
    Bug("a forgotten text is found", SuffixStore, "_forget", instead(forgets_the_text_alone)),
    Bug("a prediction ends in a token of no vocabulary", PredictionProposer, "propose", ends_in(VOCABULARY_SIZE)),
    Bug("earlier text is taken for this one", SuffixProposer, "propose", takes_its_runs_for_text),
    Bug("a repetition is taken for text", NgramProposer, "propose", takes_its_runs_for_text),
)

PROMPTS = (
    Bug(
        "what was scored of a prompt is forgotten",
        Generation,
        "_on_prompt_part",
        keeping("scored_index", lambda generation, item: generation._session),
    ),
)

BUGS = (*FENCES, *ROUNDS, *TREE, *DRAFT, *CACHE, *SPACE, *TIMES, *PATHS, *HEADS, *SOURCES, *PROMPTS, *MOVES)

# Not a bug: the choice among free cells changes where a node's keys lie, and no value that is read.
HARMLESS = (Bug("the lowest free cell is taken", DraftSession, "place", instead(placed_lowest)),)
