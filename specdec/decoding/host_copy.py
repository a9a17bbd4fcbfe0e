"""Copies between host and device: numbers are sent to a device without a wait and fetched together, in one copy.

Reading a number from a GPU waits for all its queued work, so a step's results are copied to the host once. A decision
that depends on an intermediate number is replaced by an assumption that nearly always holds; its check is copied with
the results, and if it fails, the whole computation is repeated with waits. On a CPU reads are free: nothing is assumed
and nothing copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from specdec.engine.readback import Readback

Result = TypeVar("Result")


def is_device(device: torch.device) -> bool:
    """Whether reading a number from the device waits for it."""
    return device.type != "cpu"


def sent(numbers: Sequence[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a tensor of the host's numbers on a device, without waiting for it."""
    tensor = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def sent_together(
    whole: Sequence[Sequence[int]], real: Sequence[Sequence[float]], device: torch.device
) -> tuple[Tensor, ...]:
    """Returns lists of whole numbers as int64, then lists of real ones as float64, on a device by one copy; each begins
    at a multiple of 16 bytes."""
    parts = [numpy.array(own, numpy.int64) for own in whole]
    parts += [numpy.array(own, numpy.float64).view(numpy.int64) for own in real]
    starts = [0, *itertools.accumulate(len(part) + len(part) % 2 or 2 for part in parts)]
    words = numpy.zeros(starts[-1], numpy.int64)
    for start, part in zip(starts, parts):
        words[start : start + len(part)] = part
    together = sent(torch.from_numpy(words), device)
    fields = [together[start : start + len(part)] for start, part in zip(starts, parts)]
    return *fields[: len(whole)], *(own.view(torch.float64) for own in fields[len(whole) :])


class HostCopy:
    """The copy of one computation's results to the host, and its assumptions. `assumes`: assume instead of reading.
    `readback`: of the step before; its numbers come in the same copy."""

    def __init__(self, device: torch.device, assumes: bool, readback: Readback | None = None) -> None:
        self.assumes = assumes
        self._readback = readback
        self._is_device = is_device(device)
        self._tensors: list[Tensor] = []
        self._assumptions: list[Callable[[], Any]] = []
        self._fetched: list[Any] | None = None

    def to_host(self, tensor: Tensor) -> Callable[[], Any]:
        """Registers a tensor to fetch; returns a function that returns its numbers, called after all registrations."""
        if not self._is_device:
            return tensor.tolist
        index = len(self._tensors)
        self._tensors.append(tensor)
        return lambda: self._read()[index]

    def assume_none(self, exceptions: Tensor) -> None:
        """Records the assumption that no element is true.  # [...] bool"""
        self.assume_zero(exceptions.any().view(1))

    def assume_zero(self, numbers: Tensor) -> None:
        """Records the assumption that all numbers are 0.  # [n]"""
        self._assumptions.append(self.to_host(numbers))

    def was_wrong(self) -> bool:
        """Whether an assumption failed, so that the fetched numbers are invalid."""
        return any(any(read()) for read in self._assumptions)

    def _read(self) -> list[Any]:
        """Copies once. Float64 holds every token id and every probability exactly."""
        if self._fetched is None:
            tensors = [*self._tensors, *([self._readback.numbers] if self._readback else ())]
            flat = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in tensors]).tolist()
            counts = [tensor.numel() for tensor in self._tensors]
            ends = list(itertools.accumulate(counts))
            if self._readback:
                self._readback.take(flat[sum(counts) :])
            parts = [flat[end - count : end] for count, end in zip(counts, ends)]
            self._fetched = [shaped(part, tensor) for part, tensor in zip(parts, self._tensors)]
        return self._fetched


def shaped(numbers: list[float], like: Tensor) -> Any:
    """Returns flat numbers in the shape of `like.tolist()`."""
    whole: list[Any] = list(numbers) if like.is_floating_point() else [int(number) for number in numbers]
    for size in reversed(like.shape[1:]):
        whole = [whole[start : start + size] for start in range(0, len(whole), size)] if size else [[]] * like.shape[0]
    return whole


def with_one_host_copy(
    device: torch.device, compute: Callable[[HostCopy], Callable[[], Result]], readback: Readback | None = None
) -> Result:
    """Returns the result of a computation that registers its fetches and returns a function for its result.

    It runs once, or twice after a failed assumption; it must not change its inputs. `readback`: see `HostCopy`.
    """
    host_copy = HostCopy(device, is_device(device), readback)
    finish = compute(host_copy)
    if host_copy.was_wrong():
        finish = compute(HostCopy(device, assumes=False))
    return finish()
