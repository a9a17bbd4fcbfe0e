"""Which lane of a session's cache evaluates a path of its tree.

A path goes on in the lane that ends right before it. Where another path goes on there too, it takes a fork, which
shares the blocks before the parting and copies the one it writes to. Lanes are derived state: any of them may be
dropped at any time, and costs the re-feeding of a few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.engine.kv_cache import KVCache
from specdec.errors import CacheExhausted
from specdec.replica.sessions import HeldSession, Lane

BRANCH_LANE_COUNT_MAX = 16  # twice the leaves that pay; each costs a block or two
LANE_ROOM = 16  # positions a branch lane has beyond its first path; a path that outgrows them is forked again


def settle(held: HeldSession, cache: KVCache) -> None:
    """After a commit: gives up the branch lanes that left the committed path."""
    for lane in held.lanes[1:]:
        agreed = held.agreement(lane, held.tokens)
        if agreed < min(len(held.tokens), lane.table.length):
            drop(held, lane, cache)


def drop(held: HeldSession, lane: Lane, cache: KVCache) -> None:
    """Releases a branch lane; a feed of it that has not run never will."""
    lane.feed = None
    held.lanes.remove(lane)
    cache.release(lane.table)


def lane_for(held: HeldSession, path: Sequence[int], cache: KVCache) -> Lane | None:
    """An idle lane that holds as much of `path` as any, at the cost of no other path if it can be; None: all are busy.

    It becomes the most recently used.
    """
    agreements = [held.agreement(lane, path) for lane in held.lanes]
    length = max(agreements)
    best = None
    for lane, agreed in zip(held.lanes, agreements):
        is_end = lane.table.length == agreed == length
        if is_end and lane.feed is None and lane.table.capacity >= len(path):
            best = lane
            break
    if best is None:
        source = held.lanes[agreements.index(length)]
        best = fork(held, source, min(length, len(path) - 1), len(path), cache)
    if best is None:
        main = held.lanes[0]
        return main if main.feed is None else None
    if best is not held.lanes[0]:
        held.lanes.remove(best)
        held.lanes.append(best)
    return best


def fork(held: HeldSession, source: Lane, length: int, path_length: int, cache: KVCache) -> Lane | None:
    """A branch lane that shares the first `length` tokens of another; None where the cache has no room for one.

    The least recently used idle lanes make room for it.
    """
    idle = [lane for lane in held.lanes[1:] if lane.feed is None and lane is not source]
    capacity = min(held.capacity, path_length + LANE_ROOM)
    while True:
        is_full = len(held.lanes) > BRANCH_LANE_COUNT_MAX
        try:
            table = None if is_full else cache.fork(source.table, length, capacity)
        except CacheExhausted:
            table = None
        if table is not None:
            lane = Lane(table, source.fed, min(source.agreed, length))
            held.lanes.append(lane)
            return lane
        if not idle:
            return None
        drop(held, idle.pop(0), cache)
