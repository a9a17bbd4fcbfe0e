"""Gathers every rank's part of a tensor to every rank, in rank order.

The caller computes a sum over ranks part by part in rank order: a library's own reduction adds in an order that depends
on the size of the message, hence on the batch. Over `torch.distributed` between machines and GPUs, through shared
memory between processes of one machine.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed

from specdec.errors import ReplicaUnavailable

STARTING_PATIENCE_S = 120.0  # ranks load and measure their kernels at different speeds
FOLDER = Path("/dev/shm")
SLOT_BYTES = 2 << 20  # of one rank's part in one buffer; larger parts are sent in pieces
COUNTER_BYTES = 64  # a cache line each: ranks that poll one counter do not disturb another
BUFFER_COUNT = 2
SPIN_COUNT = 400  # polls before the first yield of the processor: about twenty microseconds
YIELD_S = 0.002  # after yielding for this long, the wait sleeps between polls
SLEEP_S = 0.0002


class Exchange(Protocol):
    """A gather over ranks. All ranks call it in the same order with parts of equal shape and type.

    `is_captured`: a captured step may exchange.
    """

    rank: int
    rank_count: int
    name: str
    is_captured: bool

    def begin(self) -> None:
        """Begins a step; all ranks call it before its first gather."""

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns the parts of all ranks, in rank order, valid until the next gather but one. Raises when a rank is
        lost or later than the patience; then no part may be used."""

    def set_patience(self, patience_s: float) -> None:
        """Sets the longest wait of a gather for the slowest rank."""


class DistributedExchange:
    """An exchange over a process group of `torch.distributed`: gloo for CPU tensors, NCCL for those of a GPU."""

    is_captured = False

    def __init__(self, group: Any, name: str) -> None:
        self.rank: int = group.rank()
        self.rank_count: int = group.size()
        self.name = name
        self._group = group

    def begin(self) -> None:
        pass

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        own = part.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.rank_count)]
        # As bytes: not every backend carries every element type.
        outgoing, incoming = _bytes(own), [_bytes(each) for each in parts]
        self._group.allgather([incoming], [outgoing]).wait()
        return parts

    def set_patience(self, patience_s: float) -> None:
        self._group.set_timeout(timedelta(seconds=patience_s))


def open_gloo(store: torch.distributed.Store, rank: int, rank_count: int, host: str) -> DistributedExchange:
    """Connects the ranks over TCP, listening on the interface of `host` only."""
    kind: Any = torch.distributed.ProcessGroupGloo
    options = kind._Options()
    options._timeout = timedelta(seconds=STARTING_PATIENCE_S)
    options._devices = [kind.create_device(hostname=host)]
    prefixed = torch.distributed.PrefixStore("gloo/", store)
    return DistributedExchange(kind(prefixed, rank, rank_count, options), "gloo")


def open_nccl(store: torch.distributed.Store, rank: int, rank_count: int) -> DistributedExchange:
    """Connects the ranks' GPUs; each rank's own is the current device."""
    kind: Any = torch.distributed.ProcessGroupNCCL
    prefixed = torch.distributed.PrefixStore("nccl/", store)
    timeout = timedelta(seconds=STARTING_PATIENCE_S)
    return DistributedExchange(kind(prefixed, rank, rank_count, timeout), "nccl")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def is_supported() -> bool:
    """Whether this machine preserves the order of stores and has shared memory."""
    return platform.machine() in ("x86_64", "AMD64") and FOLDER.is_dir()


def file_bytes(rank_count: int) -> int:
    """Returns the size of the shared file."""
    return rank_count * (COUNTER_BYTES + BUFFER_COUNT * SLOT_BYTES)


class SharedExchange:
    """An exchange through one shared file of `file_bytes` zeros, mapped by every rank, with a counter of exchanges
    for each rank.

    Two buffers suffice: a rank reuses a buffer only after every other rank has counted the exchange between, hence has
    read the one before. A counter is written after its bytes, an order that x86 processors preserve; others are not
    supported (`is_supported`).

    `check` is called while waiting and raises when another rank is lost.
    """

    name = "shared memory"
    is_captured = False

    def __init__(self, file: int, rank: int, rank_count: int, check: Callable[[], None]) -> None:
        """Maps the open file `file`; the descriptor may be closed afterwards."""
        self.rank = rank
        self.rank_count = rank_count
        self._check = check
        self._patience_s = STARTING_PATIENCE_S
        self._memory = mmap.mmap(file, file_bytes(rank_count))
        self._counters = memoryview(self._memory).cast("q")
        self._places = [other * COUNTER_BYTES // 8 for other in range(rank_count)]
        self._others = [place for other, place in enumerate(self._places) if other != rank]
        self._count = 0
        slots = torch.frombuffer(self._memory, dtype=torch.uint8, offset=rank_count * COUNTER_BYTES)
        self._slots = slots.view(BUFFER_COUNT, rank_count, SLOT_BYTES)
        self._views: dict[tuple[torch.Size, torch.dtype], list[list[torch.Tensor]]] = {}

    def begin(self) -> None:
        pass

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        if part.numel() * part.element_size() <= SLOT_BYTES:
            return self._gather(part)
        pieces = part.contiguous().view(-1).split(SLOT_BYTES // part.element_size())
        gathered = [[each.clone() for each in self._gather(piece)] for piece in pieces]
        return [torch.cat(of_rank).view(part.shape) for of_rank in zip(*gathered)]

    def set_patience(self, patience_s: float) -> None:
        self._patience_s = patience_s

    def _gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        key = part.shape, part.dtype
        views = self._views.get(key) or self._make_views(part)
        count = self._count = self._count + 1
        parts = views[count % BUFFER_COUNT]
        parts[self.rank].copy_(part)
        counters = self._counters
        counters[self._places[self.rank]] = count
        for place in self._others:
            if counters[place] < count:
                self._wait(place, count)
        return parts

    def _make_views(self, part: torch.Tensor) -> list[list[torch.Tensor]]:
        size = part.numel() * part.element_size()
        views = [[slot[:size].view(part.dtype).view(part.shape) for slot in buffer] for buffer in self._slots]
        self._views[part.shape, part.dtype] = views
        return views

    def _wait(self, place: int, count: int) -> None:
        counters = self._counters
        for _ in range(SPIN_COUNT):
            if counters[place] >= count:
                return
        started_s = time.perf_counter()
        while counters[place] < count:
            waited_s = time.perf_counter() - started_s
            if waited_s < YIELD_S:
                time.sleep(0)  # lets other threads of this process run
                os.sched_yield()
                continue
            self._check()
            if waited_s > self._patience_s:
                late = self._places.index(place)
                raise ReplicaUnavailable(f"rank {late} did not answer an exchange within {self._patience_s:g} s")
            time.sleep(SLEEP_S)
