"""The coordinator's draft tree: all draft tokens received below the committed ones, of a draft and of a feature head.

A node is named (epoch, node_id); the epochs of a head, one a round, are negative (`head_epoch`). It is usable while the
path from its root agrees with the committed tokens, whenever it arrives. The tree re-roots along every commit and drops
all nodes off the path. It knows neither models nor messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from specdec.protocol.types import DraftNode, DraftProbs, Proposer, Rule

LATE_POSITIONS_MAX = 256  # names this far behind the committed tokens are dropped, and later nodes below them
NAME_COUNT_KEPT = 256  # old names are removed when there are more, not at every commit
NODE_COUNT_MAX = 4096  # names of nodes held at once: many times what the largest window grows between two commits


def head_epoch(round_index: int) -> int:
    """Returns the epoch of the nodes that the target's feature head drafted after a round: no draft has it."""
    return -1 - round_index


def is_sound(node: DraftNode, rule: Rule, vocabulary_size: int) -> bool:
    """Whether a node fits the vocabulary and the rule, and a distribution holds its token."""
    if not 0 <= node.token_id < vocabulary_size:
        return False
    if rule is not Rule.REJECTION or not node.proposal:
        return node.draft_probs is None
    probs = node.draft_probs
    return probs is not None and probs.token_ids[-1] < vocabulary_size and node.token_id in probs.token_ids


@dataclass(slots=True, eq=False)
class NodeBase:
    """One token after one path, in the tree of either side; `length`: of the path that ends with it.

    `proposal`: a child that is offered first, or was drawn. `alive`: until a commit takes another path.
    """

    length: int
    token_id: int
    parent: Self | None = None
    children: dict[int, Self] = field(default_factory=dict)
    proposal: Self | None = None
    alive: bool = True

    def below(self) -> Iterator[Self]:
        """Yields this node and every node below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def end(self) -> list[Self]:
        """Returns this node and every node below it, all marked as not alive and without parents: what has no holder is
        free at once, and the garbage collector has no dead trees to find."""
        nodes = list(self.below())
        for node in nodes:
            node.alive, node.parent = False, None
        return nodes

    def check(self) -> None:
        """Raises AssertionError naming the invariant that is broken below a root."""
        for node in self.below():
            assert node.alive, "nodes below the root are alive"
            for token_id, child in node.children.items():
                assert (child.length, child.parent) == (node.length + 1, node), "a child is one longer than its parent"
                assert child.token_id == token_id, "a child is filed under its own token"
            proposal = node.proposal
            assert proposal is None or node.children.get(proposal.token_id) is proposal, "a proposal is a child"


@dataclass(slots=True, eq=False)
class TreeNode(NodeBase):
    """A node of the coordinator's tree.

    `draft_probs`: of its proposal child (REJECTION only); `drawn`: that child and its siblings, in the order in which
    they were drawn from it without replacement, with names one after another. `name`: (epoch, node_id), of a proposal
    the name under which it became one. `rank`: place among the children of its parent; `confidence`: the draft's, as a
    bin (not under REJECTION).
    """

    draft_probs: DraftProbs | None = None
    drawn: list[TreeNode] = field(default_factory=list)
    name: tuple[int, int] = (0, 0)
    rank: int = 0
    confidence: int = 0

    @property
    def proposer(self) -> Proposer:
        """Whose node it is."""
        return Proposer.HEADS if self.name[0] < 0 else Proposer.DRAFT


class ReceivedTree:
    """The nodes below the committed tokens, a list that its owner extends before it calls `commit`.

    `named`: nodes by (epoch, node_id), below the committed tokens and recently committed ones.
    """

    def __init__(self, committed: Sequence[int]) -> None:
        self.committed = committed
        self.root = TreeNode(len(committed), committed[-1])
        self.named: dict[tuple[int, int], TreeNode] = {}

    def take(
        self, epoch: int, root_length: int, nodes: Sequence[DraftNode], rule: Rule, vocabulary_size: int
    ) -> tuple[int, int]:
        """Adds nodes up to the first malformed one, or to one that NODE_COUNT_MAX does not admit. Returns the number of
        those that are late, and of those left out."""
        late_count, free_count = 0, NODE_COUNT_MAX - len(self.named)
        for index, node in enumerate(nodes):
            if index == free_count or not is_sound(node, rule, vocabulary_size):
                return late_count, len(nodes) - index
            late_count += self.add(epoch, root_length, node) is None
        return late_count, 0

    def add(self, epoch: int, root_length: int, sent: DraftNode) -> TreeNode | None:
        """Adds a node and returns it; None if it is stale, a duplicate, or its parent is unknown.

        Of two proposal children of one node that were not drawn together the first to arrive stays: the order does not
        depend on the tokens, so it cannot change the target distribution (docs/exactness.md).
        """
        name = (epoch, sent.node_id)
        parent, length = self._parent(epoch, root_length, sent.parent_id)
        if length == 0 or name in self.named:
            return None
        if length < len(self.committed):
            if self.committed[length] != sent.token_id:
                return None
            node = self.root if length + 1 == self.root.length else TreeNode(length + 1, sent.token_id)
        else:
            node = self._attach(parent or self.root, name, sent)
        self.named[name] = node
        return node

    def _parent(self, epoch: int, root_length: int, node_id: int) -> tuple[TreeNode | None, int]:
        """Returns the living node of an id and the length of its path, 0 if there is none. On the committed path the
        length alone identifies it."""
        if node_id == 0:
            return None, root_length if 1 <= root_length <= len(self.committed) else 0
        node = self.named.get((epoch, node_id))
        return (node, node.length) if node is not None and node.alive else (None, 0)

    @staticmethod
    def _attach(parent: TreeNode, name: tuple[int, int], sent: DraftNode) -> TreeNode:
        node = parent.children.get(sent.token_id)
        if node is None:
            node = TreeNode(parent.length + 1, sent.token_id, parent, name=name, rank=len(parent.children))
            node.confidence = sent.confidence
            parent.children[sent.token_id] = node
        if not sent.proposal:
            return node
        if parent.proposal is None:
            parent.proposal, parent.draft_probs, node.name = node, sent.draft_probs, name
        epoch, first_id = parent.proposal.name
        if sent.draft_probs is not None and name == (epoch, first_id + len(parent.drawn)):
            parent.drawn.append(node)
        return node

    def commit(self, token_ids: Sequence[int]) -> bool:
        """Re-roots the tree at newly committed tokens; False if they left it, and it is empty now."""
        child: TreeNode | None = self.root
        for token_id in token_ids:
            length, child = self.root.length + 1, self._descend(token_id)
            self.root = child or TreeNode(length, token_id)
        if len(self.named) > NAME_COUNT_KEPT:
            oldest = len(self.committed) - LATE_POSITIONS_MAX
            self.named = {name: node for name, node in self.named.items() if node.alive and node.length >= oldest}
        return child is not None

    def _descend(self, token_id: int) -> TreeNode | None:
        """Detaches and returns the root's child of this token; all other nodes below the root end."""
        root = self.root
        child = root.children.pop(token_id, None)
        for sibling in root.children.values():
            sibling.end()
        root.children, root.proposal, root.draft_probs, root.drawn = {}, None, None, []
        if child is not None:
            child.parent = None
        return child

    def node(self, token_ids: Sequence[int]) -> TreeNode | None:
        """Returns the node at the end of a path below the committed tokens; None if the tree does not hold it."""
        node: TreeNode | None = self.root
        for token_id in token_ids:
            node = None if node is None else node.children.get(token_id)
        return node

    def clear(self) -> None:
        """Drops every node below the committed tokens, and every name."""
        self.root.end()
        self.named.clear()
        self.root = TreeNode(len(self.committed), self.committed[-1])

    def proposal_path(self, length_max: int) -> list[TreeNode]:
        """Returns the nodes below the root along proposal children, at most `length_max`."""
        path: list[TreeNode] = []
        node = self.root.proposal
        while node is not None and len(path) < length_max:
            path.append(node)
            node = node.proposal
        return path

    def check(self) -> None:
        """Raises AssertionError naming the broken invariant."""
        assert self.root.length == len(self.committed), "the root stands at the committed length"
        self.root.check()
