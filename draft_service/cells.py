"""The cache cells of a session: one for each committed token and each node of its tree.

A node takes any free cell and sees the cells of the committed tokens, of its ancestors and its own. A commit keeps the
cells along its path in place; nothing is copied and nothing is fed again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy

from specdec.engine.interface import TreeRows


class Cells:
    """The cells [0, capacity) of one session. `committed`: those of its committed tokens, by position. `held_count`:
    only cells [0, held_count) can be taken, since the session holds their blocks."""

    def __init__(self, capacity: int) -> None:
        self.committed: list[int] = []
        self.held_count = 0
        self._capacity = capacity
        self._visible = numpy.zeros(capacity, dtype=bool)  # of committed tokens
        self._positions = numpy.zeros(capacity, dtype=numpy.int64)
        self._freed: list[int] = []  # a heap: low cells first, so that used cells lie close together
        self._end = 0  # cells from here on were never taken

    @property
    def free_count(self) -> int:
        """The number of cells that can be taken."""
        return len(self._freed) + self.held_count - self._end

    def hold(self, count: int) -> None:
        """Lets the first `count` cells be taken, of those of the capacity."""
        self.held_count = min(count, self._capacity)

    def take(self, position: int) -> int:
        """Takes a free cell for a token at `position`; there must be one."""
        if self._freed:
            cell = heapq.heappop(self._freed)
        else:
            cell = self._end
            self._end += 1
        self._positions[cell] = position
        return cell

    def give_back(self, cells: Iterable[int]) -> None:
        """Frees cells of tokens that are not committed."""
        for cell in cells:
            heapq.heappush(self._freed, cell)

    def commit(self, cells: Sequence[int]) -> None:
        """Appends the cells of the next committed tokens, in order."""
        self.committed.extend(cells)
        self._visible[list(cells)] = True

    def truncate(self, length: int) -> None:
        """Frees the cells of committed tokens from position `length` on."""
        gone = self.committed[length:]
        del self.committed[length:]
        self._visible[gone] = False
        self.give_back(gone)

    def chain(self, cells: Sequence[int]) -> TreeRows:
        """Returns the rows of committed tokens about to be fed: each sees those before it."""
        visible = numpy.repeat(self._visible[None, : self._end], len(cells), 0)
        visible[:, cells] = numpy.tri(len(cells), dtype=bool)
        return TreeRows(cells, self._positions[list(cells)].tolist(), visible, self._positions)

    def nodes(self, paths: Sequence[Sequence[int]]) -> TreeRows:
        """Returns the rows of nodes; a path lists the cells below the committed tokens that its node sees, own last."""
        visible = numpy.repeat(self._visible[None, : self._end], len(paths), 0)
        for row, path in zip(visible, paths):
            row[list(path)] = True
        cells = [path[-1] for path in paths]
        return TreeRows(cells, self._positions[cells].tolist(), visible, self._positions)

    def check(self, used: Iterable[int]) -> None:
        """Raises AssertionError unless each cell is free, committed or among those that nodes use."""
        known = [*self._freed, *self.committed, *used]
        assert sorted(known) == list(range(self._end)), f"cells {sorted(known)} of {self._end}"
        assert self._end <= self.held_count, f"{self._end} cells are taken of {self.held_count}"
        assert numpy.flatnonzero(self._visible).tolist() == sorted(self.committed), "committed cells are seen"
