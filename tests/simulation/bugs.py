"""The planted protocol bugs: each one line of the real source changed, as a slip of the hand might change it."""

from __future__ import annotations

from coordinator import decode_loop, rejection
from coordinator.decode_loop import Generation
from draft_service import drafter
from draft_service.drafter import DraftedSession, Drafter
from specdec.engine.kv_cache import KVCache
from specdec.protocol import session as session_module
from specdec.protocol.growth import Growth
from specdec.protocol.session import Session
from specdec.protocol.tree import DraftTree
from specdec.replica.sessions import HeldSession, HeldSessions
from target_service.room import GrowingSessions
from target_service.verifier import Verifier
from tests.simulation.planting import Bug

ROUND_FENCE = """(answer.incarnation, answer.round_index) == (
        flying.incarnation,
        flying.round_index,
    )"""

FENCES = (
    Bug(
        "evidence of another round is accepted",
        Session,
        "expects",
        ROUND_FENCE,
        "answer.incarnation == flying.incarnation",
    ),
    Bug(
        "evidence of another incarnation is accepted",
        Session,
        "expects",
        ROUND_FENCE,
        "answer.round_index == flying.round_index",
    ),
    Bug(
        "the draft's answers are not fenced",
        Session,
        "_hears_draft",
        "and incarnation == self.draft_incarnation",
        "",
    ),
    Bug(
        "a late Short of the target is answered again",
        Session,
        "on_target_short",
        "or short.incarnation != flying.incarnation",
        "",
    ),
    Bug(
        "a replica carries out items of an older incarnation",
        HeldSessions,
        "find",
        "return held if held.opened.incarnation == item.incarnation else None",
        "return held",
    ),
    Bug(
        "an older Open replaces a newer session",
        HeldSessions,
        "open",
        "held.opened.incarnation >= item.incarnation",
        "False",
    ),
    Bug("a feed runs though its session moved on", HeldSessions, "_feed", "lane.feed is feed", "True"),
    Bug("the index of a wait is ignored", Session, "on_wait_expired", "or wait_index != self.wait_index", ""),
    Bug(
        "a round asked again is answered from other noise",
        Verifier,
        "_verify",
        "EvidenceRequest(held.opened.law, item.round_index,",
        "EvidenceRequest(held.opened.law, item.round_index + held.opened.incarnation - 1,",
    ),
)

ROUNDS = (
    Bug("the round index does not advance", Session, "on_verdict", "self.round_index += 1", "pass"),
    Bug(
        "a Short is answered by the assumed length",
        Session,
        "on_target_short",
        "min(short.known_length, len(self.committed) - 1)",
        "len(self.committed) - 1",
    ),
    Bug(
        "after a Short the round is asked with other tokens",
        Session,
        "on_target_short",
        "self._send_verification(flying.draft_token_ids, flying.rows)",
        "self._verify_now()",
    ),
    Bug(
        "the target is believed to know the newest tokens",
        Session,
        "on_verdict",
        "self._target_known_length = flying.base_position",
        "self._target_known_length = flying.base_position + verdict.accepted_count",
    ),
    Bug(
        "the committed suffix begins one too late",
        session_module,
        "catch_up",
        "tuple(committed[starts[-1] :])",
        "tuple(committed[starts[-1] + 1 :]) or tuple(committed[-1:])",
    ),
    Bug("one draft token too many", Session, "_verify_now", ".draft_length_max)", ".draft_length_max + 1)"),
    Bug("the bonus token is skipped", rejection, "decide", "evidence.replacement_token_ids[-1]", "draft_token_ids[-1]"),
    Bug(
        "a rejected token is replaced by its neighbour's correction",
        rejection,
        "decide",
        "Verdict(index, evidence.replacement_token_ids[index],",
        "Verdict(index, evidence.replacement_token_ids[index + 1],",
    ),
    Bug(
        "the draws of the test share the noise of the replacement",
        decode_loop,
        "conclude",
        "Lane.ACCEPT",
        "Lane.NEXT",
    ),
    Bug(
        "rows are shifted by one",
        DraftTree,
        "proposal_rows",
        "[self.root, *self.proposal_path(length)][:length]",
        "self.proposal_path(length)",
    ),
    Bug(
        "the last token of a round is not emitted",
        Generation,
        "_on_evidence",
        "tokens[:kept], kinds",
        "tokens[: kept - 1], kinds",
    ),
    Bug(
        "a delta is numbered by what follows it",
        Generation,
        "_on_evidence",
        "Delta(first_output_index,",
        "Delta(self._walker.count,",
    ),
    Bug("the loss of the target goes unnoticed", Generation, "on_down", "self._fail(", "str("),
)

TREE = (
    Bug("a second proposal child replaces the first", DraftTree, "_attach", "and parent.proposal is None", ""),
    Bug(
        "a branch child is offered",
        DraftTree,
        "_attach",
        "node.proposal and parent.proposal is None",
        "not node.proposal or parent.proposal is None",
    ),
    Bug(
        "a late node is filed by position, not by path",
        DraftTree,
        "_parent",
        "return self.root if place.length == len(self.committed) else place",
        "return self.root if place.length <= len(self.committed) else place",
    ),
    Bug("dead places stay usable", DraftTree, "commit", "place.alive = False", "pass"),
    Bug("a commit does not re-root", DraftTree, "commit", "self.root = child", "pass"),
    Bug(
        "a commit outside the tree keeps it",
        DraftTree,
        "commit",
        "child = Place(len(self.committed), token_id)",
        "child = self.root",
    ),
    Bug(
        "late nodes are not used",
        DraftTree,
        "add",
        "if parent.length < len(self.committed):",
        "if root_length < len(self.committed):\n        return None\n    if parent.length < len(self.committed):",
    ),
    Bug("a draft that comes back finds its old tree", Session, "on_draft_up", "self.tree.clear()", "pass"),
    Bug(
        "a draft that comes back finds its old incarnation",
        Session,
        "on_draft_up",
        "self.draft_incarnation += 1",
        "self.draft_incarnation = 1",
    ),
    Bug(
        "a draft that comes back is not told the text",
        Session,
        "on_draft_up",
        "self._draft_known_length = self._draft_window = 0",
        "self._draft_window = 0",
    ),
    Bug("a lost draft is waited for", Session, "on_draft_down", "self._draft(DraftEvent.DOWN)", "pass"),
    Bug("a draft that comes back is not used", Generation, "on_up", "if replica is self._draft:", "if False:"),
)

DRAFT = (
    Bug("a restart keeps its epoch", Growth, "restart", "self.epoch = next(self._epochs)", "self.epoch = 1"),
    Bug(
        "the likeliest child is offered, not the drawn one",
        Growth,
        "evaluated",
        "guesses[0].token_id, True, row",
        "max(guesses, key=lambda guess: guess.confidence).token_id, True, row",
    ),
    Bug(
        "an unlikely drawn child is not sent",
        Drafter,
        "_keep",
        "held.grown += nodes",
        "held.grown += [node for node in nodes if node.row is None or node.token_id == min(node.row.token_ids)]",
    ),
    Bug(
        "all places of an epoch share a draw",
        Drafter,
        "_evaluate",
        "NoiseLane.DRAFT, epoch, node)",
        "NoiseLane.DRAFT, epoch, 1)",
    ),
    Bug(
        "the window is ignored",
        DraftedSession,
        "reach",
        "len(self.tokens) + self.window",
        "len(self.tokens) + self.window + 1",
    ),
    Bug("nodes are sent twice", Drafter, "_send", "held.grown = []", "pass"),
    Bug("an Extend leaves the tree as it was", Drafter, "work", "self._stop(held)", "pass"),
)

CACHE = (
    Bug("the cache is not truncated", HeldSessions, "submit", "self.engine.cache.truncate(lane.table, start)", "pass"),
    Bug("what a lane was fed is not noted", HeldSessions, "submit", "lane.fed = wanted", "pass"),
    Bug(
        "a stale cache is believed",
        HeldSession,
        "agreement",
        "while length < end and lane.fed[length] == wanted[length]:",
        "while length < end:",
    ),
    Bug(
        "a shared block is written without a copy",
        KVCache,
        "prepare_write",
        "self._holders[table.block_ids[index]] > 1",
        "False",
    ),
    Bug("a fork does not count as a holder", KVCache, "fork", "self._holders[block_id] += 1", "pass"),
    Bug("a block copied is not filled", KVCache, "_copy_on_write", "self._storage.copy_block(shared, own)", "pass"),
    Bug("Close is not honoured", HeldSessions, "close", "self._drop((stream, item.session))", "pass"),
    Bug("sessions of a lost stream are kept", HeldSessions, "close_stream", "self._drop(key)", "pass"),
    Bug(
        "the draft is not told of the end",
        Session,
        "end",
        "actions.append(ToDraft(Close(self.number, self.draft_incarnation)))",
        "pass",
    ),
    Bug(
        "branches outlive their session",
        HeldSessions,
        "_drop",
        "for lane in held.lanes:",
        "for lane in held.lanes[:1]:",
    ),
)

ROOM = (
    Bug("who adopts a block does not hold it", KVCache, "adopt", "self._holders[block_id] += 1", "pass"),
    Bug("an adopted block can be taken", KVCache, "adopt", "self._kept.pop(block_id, None)", "pass"),
    Bug("a block is published one too early", GrowingSessions, "_publish", "length)", "lane.table.length + 7)"),
    Bug("an evicted session is taken for cached", KVCache, "vacate", "table.length, ", "_, "),
    Bug("the feed of an evicted session runs", GrowingSessions, "_evict", "lane.feed = None", "pass"),
    Bug(
        "what an evicted session was asked is forgotten",
        GrowingSessions,
        "_evict",
        "if lane.work is not None:",
        "if False:",
    ),
    Bug("who waits for room is forgotten", Verifier, "before_step", "self._sessions.take_turn()", "0.0"),
    Bug("who has left is waited for", GrowingSessions, "_drop", "self._waiting.discard(held)", "pass"),
    Bug("who found no room never looks again", GrowingSessions, "_reopen", "free_count <= self._tried[1]", "True"),
)

TIMES = (
    Bug("a step is held for ever", Verifier, "before_step", "return hold_s", "return 0.001"),
    Bug("the end of a wait changes nothing", Session, "on_wait_expired", "return self._verify_now()", "return []"),
    Bug("nodes do not end a wait", Session, "on_nodes", "self._verify_when_ready() if self.waiting else []", "[]"),
    Bug(
        "what a policy switches on again is not told the text",
        Session,
        "_commit_to_draft",
        "self._draft_known_length, self._draft_window = len(self.committed), plan.window",
        "self._draft_known_length, self._draft_window = len(self.committed) + (not plan.window), plan.window",
    ),
)

BUGS = (*FENCES, *ROUNDS, *TREE, *DRAFT, *CACHE, *ROOM, *TIMES)

# Not a bug: a lane is only where work goes on cheapest. What it holds is compared with every path that is fed to it, so
# one chosen badly costs the re-feeding of a few tokens, and nothing else can be seen of it.
HARMLESS = (
    Bug(
        "a path goes on in a lane that holds another",
        drafter,
        "lane_for",
        "is_end = lane.table.length == agreed == length",
        "is_end = lane.table.length == length",
    ),
)
