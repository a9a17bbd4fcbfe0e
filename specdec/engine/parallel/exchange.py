"""Every rank's part of a tensor, brought to every rank in rank order.

A sum over ranks is made from these by whoever needs one, part by part in rank order: a library's own reduction adds in
an order that depends on the size of the message, hence on the batch. Over `torch.distributed` between machines and
GPUs, through shared memory (`shared_memory`) between processes of one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

STARTING_PATIENCE_S = 120.0  # ranks load and measure their kernels at different speeds


class Exchange(Protocol):
    """What all ranks call in the same order with parts of equal shape and type."""

    rank: int
    rank_count: int
    name: str

    def gather(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of all ranks, in rank order, to be read before the next gather but one. Raises when a rank is
        lost or later than the patience; then no part may be used."""

    def set_patience(self, patience_s: float) -> None:
        """How long a gather may wait for the slowest rank."""


class DistributedExchange:
    """An exchange over a process group of `torch.distributed`: gloo for CPU tensors, NCCL for those of a GPU."""

    def __init__(self, group: Any, name: str) -> None:
        self.rank: int = group.rank()
        self.rank_count: int = group.size()
        self.name = name
        self._group = group

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
