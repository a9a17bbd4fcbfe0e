"""What the files of a folder's weights hold, by the names of the model's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from safetensors import safe_open

from specdec.engine.packed import PackedWeight
from specdec.errors import ModelRefused, refusing
from specdec.folders import shown

ENTRY = "quantization_config"  # of config.json, where weights are packed
PLAIN_TYPES = ("F64", "F32", "BF16", "F16")  # of weights that are not packed, in the letters of safetensors


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


class PackedScheme(Protocol):
    """What a folder's config.json says of its packed weights."""

    def weights(self, stored: Mapping[str, StoredTensor]) -> PackedFolder:
        """Returns the weights that tensors of safetensors files hold. Raises ModelRefused for one that is not
        understood."""
        ...


def read_tensor(stored: Mapping[str, StoredTensor], name: str) -> torch.Tensor:
    """Returns a tensor of a safetensors file. Raises ModelRefused."""
    file = stored[name].file
    with refusing(str(file)), safe_open(file, "pt") as opened:
        found: torch.Tensor = opened.get_tensor(name)
    return found


def refuse_tensor(stored: Mapping[str, StoredTensor], name: str, what: str, value: object, limit: str) -> NoReturn:
    """Raises ModelRefused: FILE: NAME has the WHAT VALUE; it must be LIMIT."""
    raise ModelRefused(f"{stored[name].file}: {name} has the {what} {shown(value)}; it must be {limit}")


def check_plain(stored: Mapping[str, StoredTensor], name: str) -> None:
    """Raises ModelRefused for a tensor that belongs to no packed weight and holds no numbers of its own."""
    if stored[name].dtype not in PLAIN_TYPES:
        refuse_tensor(stored, name, "type", stored[name].dtype, f"one of {', '.join(PLAIN_TYPES)}, or have a scale")
