"""Between host and device: numbers reach a device without waiting for it, and come back together, in one copy.

Reading a number from a GPU means waiting until it has done all it was given, so a step's results cross once. What a
computation would have to ask on the way it presumes instead, where it is nearly always so; whether it was so crosses
with the results, and where it was not, everything is done once more by asking. On a CPU asking costs nothing: nothing
is presumed there, and nothing copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def is_far(device: torch.device) -> bool:
    """Whether asking the device for a number means waiting for it."""
    return device.type != "cpu"


def sent(numbers: Sequence[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the host's numbers on a device; does not wait for it."""
    tensor = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Crossing:
    """What one computation brings to the host, and what it presumed. `is_blind`: presume, do not ask."""

    def __init__(self, device: torch.device, is_blind: bool) -> None:
        self.is_blind = is_blind
        self._is_far = is_far(device)
        self._tensors: list[Tensor] = []
        self._presumptions: list[Tensor] = []
        self._brought: list[Any] | None = None

    def bring(self, tensor: Tensor) -> Callable[[], Any]:
        """The way to the tensor's numbers, as `tolist` gives them: to be called when all tensors were named."""
        if not self._is_far:
            return tensor.tolist
        index = len(self._tensors)
        self._tensors.append(tensor)
        return lambda: self._read()[index]

    def presume_none(self, exceptions: Tensor) -> None:
        """Notes that no element is taken to be true.  # [...] bool"""
        self._presumptions.append(exceptions.any().view(1))

    def was_wrong(self) -> bool:
        """Whether something presumed was not so: then what was brought is of no meaning."""
        if not self._presumptions:
            return False
        return any(self.bring(torch.cat(self._presumptions))())

    def _read(self) -> list[Any]:
        """The one copy. Float64 holds every token id and every probability exactly."""
        if self._brought is None:
            counts = [tensor.numel() for tensor in self._tensors]
            flat = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in self._tensors]).tolist()
            ends = list(itertools.accumulate(counts))
            parts = [flat[end - count : end] for count, end in zip(counts, ends)]
            self._brought = [shaped(part, tensor) for part, tensor in zip(parts, self._tensors)]
        return self._brought


def shaped(numbers: list[float], like: Tensor) -> Any:
    """Flat numbers as `like.tolist()` would give them."""
    whole: list[Any] = list(numbers) if like.is_floating_point() else [int(number) for number in numbers]
    for size in reversed(like.shape[1:]):
        whole = [whole[start : start + size] for start in range(0, len(whole), size)] if size else [[]] * like.shape[0]
    return whole


def crossed(device: torch.device, compute: Callable[[Crossing], Callable[[], Result]]) -> Result:
    """The result of a computation that names what it brings and returns how to make the result of it.

    Run once, or twice where something presumed was wrong; it must not change what it reads.
    """
    crossing = Crossing(device, is_blind=is_far(device))
    finish = compute(crossing)
    if crossing.was_wrong():
        finish = compute(Crossing(device, is_blind=False))
    return finish()
