"""A session on the draft: its tree and the cells of its nodes, which follow the committed tokens.

Committed tokens lie in the cells of their positions, nodes in any cells behind them: in that of its own position while
it is free, so that a chain is in place, else in the last free one. A commit moves the nodes along its path to their
positions, and those that were in the way to the cells that became free.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specdec.decoding.proposal import ProposalRequest
from specdec.decoding.token_path import TokenCounts
from specdec.engine.cache.kv_cache import KVCache
from specdec.engine.retokenizer import Reading
from specdec.grammar.jobs import Masks, SessionGrammar
from specdec.protocol.growth import NO_CELL, GrowingNode, GrowingTree
from specdec.protocol.items import NO_TRACE, Trace
from specdec.protocol.types import DraftNode
from specdec.replica.handler import ReplicaSession


class MaskedNodes(list[ProposalRequest]):
    """Nodes of one session under a grammar, whose masks are begun."""

    def __init__(self, requests: Sequence[ProposalRequest], masks: Masks) -> None:
        super().__init__(requests)
        self.masks = masks
        masks.begin(lambda: None)


@dataclass(eq=False)
class DraftSession(ReplicaSession):
    """A session and its tree. `nodes`: the evaluated ones by their cells. `secret` keys the draft's own draws, which no
    other noise shares.

    `committed_s`: when its last commit arrived. `reading`: of a draft with another tokenizer. `wait_length`: of the
    proposal path that a verification waits for. `grown`: nodes to send; `held_step_count`: steps that ended since the
    first of them. `traced_step_count`: the number of next steps recorded in detail, below the span of `group`.
    `worked_s`: of steps since the item before. `counts`: of its tokens, for penalties. `grammar`: None without.
    """

    cache: KVCache
    growth: GrowingTree
    reading: Reading | None = None
    grammar: SessionGrammar | None = None
    secret: int = field(default_factory=lambda: secrets.randbits(64))
    committed_s: float = 0.0
    window: int = 0
    nodes_per_step: int = 1
    siblings: int = 0
    has_siblings: bool = False  # or had: under REJECTION its trees then grow along first draws only
    wait_length: int = 0
    grown: list[DraftNode] = field(default_factory=list)
    held_step_count: int = 0
    traced_step_count: int = 0
    group: Trace = NO_TRACE
    worked_s: float = 0.0
    counts: TokenCounts | None = field(default=None, init=False)
    nodes: dict[int, GrowingNode] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.opened.params.has_penalties:
            self.counts = TokenCounts(self.opened.params)

    @property
    def read_tokens(self) -> Sequence[int]:
        """The committed tokens as the draft reads them, one at each position."""
        return self.tokens if self.reading is None else self.reading.tokens

    @property
    def unfed_count(self) -> int:
        """The number of committed tokens that are not in the cache."""
        return len(self.read_tokens) - self.table.length

    @property
    def input_count(self) -> int:
        """The number of tokens of an encoder's input that are not in the cache: all of them, or none."""
        return 0 if self.table.length else self.encoder_length

    @property
    def shift(self) -> int:
        """The number of positions that a node below the root has more in the draft than in the target."""
        return len(self.read_tokens) - len(self.tokens)

    @property
    def cell_end(self) -> int:
        """The cell after the last of its blocks."""
        return min(len(self.table.block_ids) * self.cache.block_size, self.table.capacity)

    @property
    def free_cell_count(self) -> int:
        """The number of cells for further tokens."""
        return self.cell_end - self.table.length - len(self.nodes)

    def masked(self, requests: list[ProposalRequest], paths: Sequence[Sequence[GrowingNode]]) -> list[ProposalRequest]:
        """Returns the requests of nodes, each after its path, with the masks of its grammar if it has one."""
        if self.grammar is None or not requests:
            return requests
        below = [[node.token_id for node in path] for path in paths]
        return MaskedNodes(requests, self.grammar.nodes(self.tokens, below))

    def place(self, node: GrowingNode) -> None:
        """Gives a node that is about to be evaluated one of the free cells, of which there must be one."""
        cell = node.length + self.shift - 1
        if cell in self.nodes or cell >= self.cell_end:
            cell = next(c for c in range(self.cell_end - 1, self.table.length - 1, -1) if c not in self.nodes)
        node.cell = cell
        self.nodes[cell] = node

    def cut(self, length: int) -> None:
        """Drops committed tokens from `length` on, and the tree below them."""
        if self.counts is not None:
            self.counts.move(self.tokens, min(length, self.counts.length))
        super().cut(length)
        self._truncate(length if self.reading is None else self.reading.cut(length))
        self.drop_tree()

    def drop_tree(self) -> None:
        """Ends the epoch: there is no tree until the next commit."""
        self._free(self.growth.drop())

    def follow(self, token_ids: Sequence[int]) -> None:
        """Re-roots the tree at newly committed tokens; drops it if they leave it, or end a character begun before."""
        if self.reading is not None and self.reading.length < len(self.tokens) - len(token_ids):
            self.drop_tree()
            return
        kept, freed = self.growth.commit(token_ids)
        self._free(freed)
        self._keep(kept)
        if self.reading is not None:
            self.reading.read(self.tokens)

    def restart(self) -> None:
        """Begins a tree at the last committed token: it is evaluated as it is fed."""
        if self.reading is not None:
            self.reading.read(self.tokens)
        self._truncate(len(self.read_tokens) - 1)
        if self.input_count:
            self.cache.give_input(self.table, self.tokens[: self.input_count])
        self.growth.restart(self.tokens)

    def _truncate(self, length: int) -> None:
        self.cache.truncate(self.table, min(length, self.table.length))

    def _free(self, cells: Iterable[int]) -> None:
        for cell in cells:
            del self.nodes[cell]

    def _keep(self, cells: Sequence[int]) -> None:
        """Moves the values in these cells, of newly committed tokens, to the positions after the cached ones."""
        places = range(self.table.length, self.table.length + len(cells))
        self._free(cells)
        moved = [(cell, place) for cell, place in zip(cells, places) if cell != place]
        spare = iter([cell for cell in cells if cell not in places])
        for cell in [place for place in places if place in self.nodes]:
            node, node_cell = self.nodes.pop(cell), next(spare)
            self.nodes[node_cell], node.cell = node, node_cell
            moved.append((cell, node_cell))
        self.cache.move(self.table, [source for source, _ in moved], [place for _, place in moved])
        self.cache.advance(self.table, places.stop)

    def check(self) -> None:
        """Raises AssertionError unless its cells are those of its committed tokens and of the nodes of its tree."""
        nodes = list(self.growth.root.below()) if self.growth.root is not None else []
        assert {node.cell: node for node in nodes if node.cell != NO_CELL} == self.nodes, "nodes have their cells"
        assert all(self.table.length <= cell < self.cell_end for cell in self.nodes), "cells of nodes"


def give_back_unlikely(chosen: dict[DraftSession, list[GrowingNode]], count_max: int) -> None:
    """Keeps the `count_max` likeliest nodes of all sessions; the others go back to their trees."""
    ranked = [(session.growth.likelihood(node), session, node) for session, nodes in chosen.items() for node in nodes]
    ranked.sort(key=lambda entry: -entry[0])
    for _, session, node in ranked[count_max:]:
        chosen[session].remove(node)
        if session.nodes_per_step > 1:  # a chain's node stays in its tree
            session.growth.give_back(node)
