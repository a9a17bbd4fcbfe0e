"""What the files of a folder's weights hold, by the names of the model's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from specdec.engine.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file of weights, by its header: its type in the format's letters, such as BF16 or Q4_1."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class PackedFolder(Protocol):
    """Weights of which some are packed: of one kind of folder. `format` names all their formats, as a numerics profile
    does; `tensors`: each weight by its parameter's name, with the shape it has unpacked."""

    @property
    def format(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def dense(self, name: str) -> torch.Tensor:
        """Returns a weight as it is unpacked: float32, or plain numbers in their own type."""
        ...

    def is_packed(self, name: str) -> bool:
        """Whether `PackedWeight` holds the weight: it is no dense one, nor packed in another way."""
        ...

    def packed(self, name: str) -> PackedWeight:
        """Returns a weight as it is packed, if `is_packed`."""
        ...
