"""The shape of the draft tokens of one verification: a tree in depth-first order, a chain in the usual case.

A verification of n draft tokens has n + 1 rows: row 0 comes after the committed tokens, row i + 1 after draft token i.
`parents[i]` is the row that draft token i follows; empty parents are a chain, in which token i follows row i. In
depth-first order a token follows the row before it, or, as the first of a branch, an earlier row of the same path.
Siblings stand in the order in which REJECTION tests them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specdec.errors import InvalidRequest
from specdec.protocol.types import CacheSize

PATH_COUNT_MAX = 16  # of one tree


class Branch(NamedTuple):
    """Draft tokens [start, end), each the child of the one before it; the first follows `depth` tokens of the path of
    the branch before. The first branch begins at the root, with depth 0."""

    start: int
    end: int
    depth: int


def branches(parents: Sequence[int], count: int) -> list[Branch]:
    """Returns the branches of `count` draft tokens in order: one for each path of the tree."""
    if not parents:
        return [Branch(0, count, 0)]
    found: list[Branch] = []
    depths = [0]  # of each row
    start = 0
    for index, parent in enumerate(parents):
        if parent != index and index:
            found.append(Branch(start, index, depths[start + 1] - 1))
            start = index
        depths.append(depths[parent] + 1)
    found.append(Branch(start, count, depths[start + 1] - 1))
    return found


def path_tokens(parts: Sequence[Branch], token_ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the draft tokens of every path from the root to the end of a branch."""
    paths: list[tuple[int, ...]] = []
    for part in parts:
        above = paths[-1][: part.depth] if paths else ()
        paths.append((*above, *token_ids[part.start : part.end]))
    return paths


def children(parents: Sequence[int], count: int) -> list[list[int]]:
    """Returns the draft tokens that follow each of the count + 1 rows, in order."""
    if not parents:
        return [*([index] for index in range(count)), []]
    following: list[list[int]] = [[] for _ in range(count + 1)]
    for index, parent in enumerate(parents):
        following[parent].append(index)
    return following


def depth_of(parents: Sequence[int], count: int) -> int:
    """Returns the number of draft tokens on the longest path."""
    return max(part.depth + part.end - part.start for part in branches(parents, count)) if parents else count


def check_shape(parents: Sequence[int], token_ids: Sequence[int]) -> None:
    """Raises InvalidRequest unless `parents` are empty or a tree of distinct siblings in depth-first order."""
    if not parents:
        return
    if len(parents) != len(token_ids):
        raise InvalidRequest("parents", len(parents), f"one per draft token, {len(token_ids)}, or none")
    path: list[int] = []  # rows that may still get a child
    siblings: set[tuple[int, int]] = set()
    path_count = 0
    for index, parent in enumerate(parents):
        path.append(index)
        while path and path[-1] != parent:
            path.pop()
        if not path:
            raise InvalidRequest(f"parents[{index}]", parent, "a row of the path before, in depth-first order")
        if (parent, token_ids[index]) in siblings:
            raise InvalidRequest(f"draft_token_ids[{index}]", token_ids[index], "unlike its siblings")
        siblings.add((parent, token_ids[index]))
        path_count += parent != index or not index
    if path_count > PATH_COUNT_MAX:
        raise InvalidRequest("parents", path_count, f"at most {PATH_COUNT_MAX} paths")


def path_count_max(cache: CacheSize | None, length_max: int, depth_max: int) -> int:
    """Returns the most paths of `depth_max` draft tokens for which a target's cache has cells beside a session of full
    length, so that a session that is alone never waits for blocks; at least 1, a chain."""
    if cache is None:
        return 1
    spare_count = cache.block_count * cache.block_size - length_max
    return min(max(1, 1 + spare_count // max(1, depth_max)), PATH_COUNT_MAX)
