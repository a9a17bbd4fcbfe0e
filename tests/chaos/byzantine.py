"""A draft that lies, over real sockets: `python -m tests.chaos.byzantine FINGERPRINT PORT`.

It prints its address. A line of its standard input is the name of the behaviour from then on; it answers with the
number of items it has sent. It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import types_pb2 as types_pb
from tests.support.scripted_draft import ScriptedDraft

Item = draft_pb.DraftResponseItem
Messages = Iterator[list[Item]]
UINT32_MAX = 2**32 - 1
EMPTY_NODE = b"\x2a\x00"  # a field `nodes` without content
CHANCE = random.Random(1)


def chain(token_ids: Sequence[int], **more: object) -> list[types_pb.TreeNode]:
    """A chain of proposal children below the root."""
    return [
        types_pb.TreeNode(node_id=number, parent_back=0, token_id=token_id, **more)
        for number, token_id in enumerate(token_ids, 1)
    ]


def nodes(commit: draft_pb.CommitItem, tree: list[types_pb.TreeNode], **more: int) -> Item:
    """The item of a tree below this commit, in an epoch of its own, unless `more` says otherwise."""
    own = {"session": commit.session, "incarnation": commit.incarnation}
    own |= {"epoch": commit.committed_length, "root_length": commit.committed_length}
    return Item(nodes=draft_pb.NodesItem(nodes=tree, **{**own, **more}))


def some(size: int, count: int = 4) -> list[int]:
    return [CHANCE.randrange(size) for _ in range(count)]


def probs(token_ids: Sequence[int], codes: bytes) -> types_pb.DraftProbs:
    """A distribution as it travels; `token_ids` as steps."""
    return types_pb.DraftProbs(token_id_steps=token_ids, weight_codes=codes)


def wrong_tokens(commit: draft_pb.CommitItem, size: int) -> Messages:
    """Well formed chains of random tokens."""
    yield [nodes(commit, chain(some(size)))]


def unknown_tokens(commit: draft_pb.CommitItem, size: int) -> Messages:
    """Token ids beyond the vocabulary, after good ones."""
    yield [nodes(commit, chain([0, CHANCE.choice([size, UINT32_MAX, 2**31])]))]


def duplicates(commit: draft_pb.CommitItem, size: int) -> Messages:
    """Each node several times: the same name with other tokens, and many proposal children of one parent."""
    same_name = [types_pb.TreeNode(node_id=1, token_id=token_id) for token_id in some(size)]
    same_parent = [
        types_pb.TreeNode(node_id=number, parent_back=number - 1, token_id=token_id)
        for number, token_id in enumerate(some(size), 1)
    ]
    yield [nodes(commit, same_name), nodes(commit, same_parent), nodes(commit, same_parent)]


def other_sessions(commit: draft_pb.CommitItem, size: int) -> Messages:
    """Nodes named as those of other sessions, of all incarnations."""
    numbers = {0, UINT32_MAX, *range(max(0, commit.session - 8), commit.session + 8)} - {commit.session}
    yield [
        nodes(commit, chain(some(size)), session=session, incarnation=incarnation)
        for session in numbers
        for incarnation in (1, 2, commit.incarnation)
    ]


def wrong_epochs(commit: draft_pb.CommitItem, size: int) -> Messages:
    """Epochs, incarnations, roots and parents that do not exist."""
    length = commit.committed_length
    yield [
        nodes(commit, chain(some(size)), epoch=epoch, root_length=root)
        for epoch, root in itertools.product((0, 1, length - 1, UINT32_MAX), (0, 1, length - 1, length + 1, UINT32_MAX))
    ]
    yield [
        nodes(commit, chain(some(size)), incarnation=incarnation)
        for incarnation in (0, commit.incarnation - 1, commit.incarnation + 1, UINT32_MAX)
        if incarnation >= 0
    ]
    yield [nodes(commit, [types_pb.TreeNode(node_id=9, parent_back=back, token_id=0) for back in (0, 3, 7)])]


def floods(commit: draft_pb.CommitItem, size: int) -> Messages:
    """Five messages of 900 items for each commit."""
    tree = chain(some(size, 3))
    for number in range(5):
        yield [nodes(commit, tree, epoch=commit.committed_length * 8 + number)] * 900


def lies_about_time(commit: draft_pb.CommitItem, size: int) -> Messages:
    """Steps that took no time, or an hour; of no row, or of four billion; of the far future."""
    step_us, step_rows = CHANCE.choice([0, 1, UINT32_MAX]), CHANCE.choice([0, 1, UINT32_MAX])
    times = {"step_us": step_us, "step_rows": step_rows, "detailed": True, "worked_us": UINT32_MAX}
    yield [nodes(commit, chain(some(size)), **times)]


def malformed_probabilities(commit: draft_pb.CommitItem, size: int) -> Messages:
    """Distributions that are none: without tokens, not ascending, beyond the vocabulary, of unequal lengths."""
    broken = (
        probs([], b""),
        probs([3, 0], b"\0\0"),
        probs([size], b"\0"),
        probs([UINT32_MAX, UINT32_MAX], b"\0\0"),
        probs([1], b"\0\0\0"),
        probs([0, *[1] * 2000], bytes(2001)),
    )
    yield [nodes(commit, chain([0], draft_probs=CHANCE.choice(broken)))]


def tiny_probabilities(commit: draft_pb.CommitItem, size: int) -> Messages:
    """Each draft token with the least weight there is, so that every test by p / q would pass it."""
    token_id = CHANCE.randrange(1, size)
    yield [nodes(commit, chain([token_id], draft_probs=probs([0, token_id], b"\0\xff")))]


def failures(commit: draft_pb.CommitItem, size: int) -> Messages:
    """Endless failures: of this session, of others, of none, and that it stops."""
    reasons = "CACHE_EXHAUSTED", "INTERNAL", "REPLICA_UNAVAILABLE", "INVALID_ARGUMENT", "x" * 200
    yield [
        Item(error=types_pb.ErrorItem(session=session, incarnation=commit.incarnation, code=code, reason=reason))
        for session in (commit.session, commit.session + 1)
        for code in (0, 3, 8, 13, 14, 99)
        for reason in reasons
    ]


def missing_tokens(commit: draft_pb.CommitItem, size: int) -> Messages:
    """It knows nothing of any session, a thousand times."""
    own = {"session": commit.session, "incarnation": commit.incarnation}
    yield [
        Item(missing_tokens=types_pb.MissingTokensItem(**own, known_length=length, unknown=bool(number % 2)))
        for number, length in enumerate([0, 1, commit.committed_length, UINT32_MAX] * 250)
    ]


def too_many_items(commit: draft_pb.CommitItem, size: int) -> Messages:
    """One message of more items than any may have."""
    yield [nodes(commit, [])] * 3000


def hollow_nodes(commit: draft_pb.CommitItem, size: int) -> Messages:
    """A tree of 150,000 empty nodes."""
    item = nodes(commit, [])
    item.nodes.MergeFromString(EMPTY_NODE * 150_000)
    yield [item]


def oversized(commit: draft_pb.CommitItem, size: int) -> Messages:
    """A message of 4 MB."""
    item = nodes(commit, [])
    item.nodes.MergeFromString(EMPTY_NODE * 2_000_000)
    yield [item]


def empty_items(commit: draft_pb.CommitItem, size: int) -> Messages:
    """Items without any content."""
    yield [Item()] * 10


def silence(commit: draft_pb.CommitItem, size: int) -> Messages:
    """Nothing at all, though it answers pings."""
    return iter(())


Behaviour = Callable[[draft_pb.CommitItem, int], Messages]
BEHAVIOURS: dict[str, Behaviour] = {
    behaviour.__name__.replace("_", " "): behaviour
    for behaviour in (
        wrong_tokens,
        unknown_tokens,
        duplicates,
        other_sessions,
        wrong_epochs,
        floods,
        lies_about_time,
        malformed_probabilities,
        tiny_probabilities,
        failures,
        missing_tokens,
        too_many_items,
        hollow_nodes,
        oversized,
        empty_items,
        silence,
    )
}


class Liar:
    """The state of the process: behaviour, vocabulary, items sent."""

    def __init__(self) -> None:
        self.behaviour: Behaviour = silence
        self.vocabulary_size = 2
        self.item_count = 0

    def answers(self, item: draft_pb.DraftRequestItem) -> Messages:
        """The messages that answer an item."""
        if item.HasField("open"):
            self.vocabulary_size = item.open.vocabulary_size
        elif item.HasField("commit"):
            for items in self.behaviour(item.commit, self.vocabulary_size):
                self.item_count += len(items)
                yield items


async def main(fingerprint: str, port: int) -> None:
    """Serves until its standard input ends."""
    liar = Liar()
    server = ScriptedDraft(liar.answers, fingerprint, port).server()
    print(await server.start(), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(liar.item_count, flush=True)
        liar.behaviour, liar.item_count = BEHAVIOURS[line.strip()], 0
    await server.stop(0)


class ByzantineDraft:
    """Such a process, from outside."""

    def __init__(self, fingerprint: str, port: int) -> None:
        command = [sys.executable, "-m", "tests.chaos.byzantine", fingerprint, str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def behave(self, name: str) -> int:
        """Changes the behaviour; returns the number of items sent under the one before."""
        print(name, file=self._process.stdin, flush=True)
        return int(self._line())

    def stop(self) -> None:
        """Ends it."""
        self._process.communicate()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
