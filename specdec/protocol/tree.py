"""The coordinator's draft tree: all draft tokens received below the committed ones.

A node is named (epoch, node) and is usable while the path from its root agrees with the committed tokens, whenever it
arrives. The tree re-roots along every commit and forgets what lies off the path. It knows nothing of models or of
messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from specdec.protocol.items import DraftNode
from specdec.protocol.types import Row

LATE_POSITIONS_MAX = 256  # names this far behind the committed tokens are forgotten; later nodes below them are dropped
NAME_COUNT_KEPT = 256  # names that may be forgotten are looked for when there are more, not at every commit


@dataclass(slots=True, eq=False)
class TreeNode:
    """One token after one path, in the tree of either side; `length` is that of the path that ends with it.

    `proposal`: the one child that may be offered. `alive`: until a commit leaves it beside its path.
    """

    length: int
    token_id: int
    parent: Self | None = None
    children: dict[int, Self] = field(default_factory=dict)
    proposal: Self | None = None
    alive: bool = True

    def below(self) -> Iterator[Self]:
        """This node and every node below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def end(self) -> list[Self]:
        """This node and every node below it, none of them alive any more."""
        nodes = list(self.below())
        for node in nodes:
            node.alive = False
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
class Place(TreeNode):
    """A node of the coordinator's tree. `row`: the distribution its proposal was drawn from (REJECTION only)."""

    row: Row | None = None


class DraftTree:
    """Places below the committed tokens, of which it keeps its own record and is told each change (`commit`).

    `named`: by (epoch, node), places below the committed tokens, and those passed not long ago.
    """

    def __init__(self, committed: Sequence[int]) -> None:
        self.committed = list(committed)
        self.root = Place(len(committed), committed[-1])
        self.named: dict[tuple[int, int], Place] = {}

    def add(self, epoch: int, root_length: int, node: DraftNode) -> Place | None:
        """Files one node; None when it is stale, doubled, or its parent is not known.

        Of two proposal children for one place the first to arrive stays: which one that is does not depend on the
        tokens, so it cannot bend the law (docs/exactness.md).
        """
        name = (epoch, node.node)
        parent, length = self._parent(epoch, root_length, node.parent)
        if length == 0 or name in self.named:
            return None
        if length < len(self.committed):
            if self.committed[length] != node.token_id:
                return None
            place = self.root if length + 1 == self.root.length else Place(length + 1, node.token_id)
        else:
            place = self._attach(parent or self.root, node)
        self.named[name] = place
        return place

    def _parent(self, epoch: int, root_length: int, node: int) -> tuple[Place | None, int]:
        """The living place a name stands for, and the length of its path, 0 where there is none. On the committed path
        the length alone says which it is."""
        if node == 0:
            return None, root_length if 1 <= root_length <= len(self.committed) else 0
        place = self.named.get((epoch, node))
        return (place, place.length) if place is not None and place.alive else (None, 0)

    @staticmethod
    def _attach(parent: Place, node: DraftNode) -> Place:
        place = parent.children.get(node.token_id)
        if place is None:
            place = parent.children[node.token_id] = Place(parent.length + 1, node.token_id, parent)
        if node.proposal and parent.proposal is None:
            parent.proposal = place
            parent.row = node.row
        return place

    def commit(self, token_ids: Sequence[int]) -> bool:
        """Takes note of committed tokens and re-roots; False when they left the tree, which is then empty."""
        child: Place | None = self.root
        for token_id in token_ids:
            self.committed.append(token_id)
            child = self._descend(token_id)
            self.root = child or Place(len(self.committed), token_id)
        if len(self.named) > NAME_COUNT_KEPT:
            oldest = len(self.committed) - LATE_POSITIONS_MAX
            self.named = {name: place for name, place in self.named.items() if place.alive and place.length >= oldest}
        return child is not None

    def _descend(self, token_id: int) -> Place | None:
        """The root's child, cut loose; whatever else stood below the root is dead."""
        root = self.root
        child = root.children.pop(token_id, None)
        for sibling in root.children.values():
            sibling.end()
        root.children, root.proposal, root.row = {}, None, None
        if child is not None:
            child.parent = None
        return child

    def place(self, token_ids: Sequence[int]) -> Place | None:
        """The place at the end of a path below the committed tokens; None where the tree does not hold it."""
        place: Place | None = self.root
        for token_id in token_ids:
            place = None if place is None else place.children.get(token_id)
        return place

    def clear(self) -> None:
        """Drops every place below the committed tokens, and every name."""
        self.root.end()
        self.named.clear()
        self.root = Place(len(self.committed), self.committed[-1])

    def proposal_path(self, length_max: int) -> list[Place]:
        """The places from the root down along proposal children, at most `length_max` of them."""
        path: list[Place] = []
        place = self.root.proposal
        while place is not None and len(path) < length_max:
            path.append(place)
            place = place.proposal
        return path

    def proposal_rows(self, length: int) -> tuple[Row, ...]:
        """The rows the first `length` tokens of the proposal path were drawn from (REJECTION only)."""
        places = [self.root, *self.proposal_path(length)][:length]
        return tuple(place.row for place in places if place.row is not None)

    def check(self) -> None:
        """Raises AssertionError naming the broken invariant."""
        assert self.root.length == len(self.committed), "the root stands at the committed length"
        self.root.check()
