"""A model whose linear layers keep their packed weights, and the weights of a packed folder as dense ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from specdec.engine.loading.fitting import check_weights, empty_model, fill_buffers, put_parameter
from specdec.engine.loading.model_folder import ModelFolder
from specdec.engine.loading.stored import PackedFolder
from specdec.engine.packed import PackedLinear
from specdec.errors import refusing


def packed_model(
    name: str, folder: ModelFolder, packed: PackedFolder, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """Returns the model with a `PackedLinear` for each linear layer whose weight is packed; every other weight is
    unpacked to this type. An embedding that is also the output layer is held as both. Raises ModelRefused."""
    model = empty_model(name, folder, dtype)
    sources = check_weights(name, model, folder)
    with refusing(name):
        for path, module in list(model.named_modules()):
            weight = packed.packed(sources[f"{path}.weight"]) if isinstance(module, nn.Linear) else None
            if weight is not None:
                bias = packed.dense(sources[f"{path}.bias"]).to(torch.float32) if f"{path}.bias" in sources else None
                parent, _, attribute = path.rpartition(".")
                setattr(model.get_submodule(parent), attribute, PackedLinear(weight, bias))
        read: dict[str, nn.Parameter] = {}
        for path, _ in list(model.named_parameters(remove_duplicate=False)):
            source = sources[path]
            if source not in read:
                read[source] = nn.Parameter(packed.dense(source).to(dtype), requires_grad=False)
            put_parameter(model, path, read[source])
        fill_buffers(model)
    return model


def unpacked(packed: PackedFolder) -> Mapping[str, Any]:
    """Returns the weights of a packed folder as dense ones, each read when `transformers` takes it, as it takes the
    slices of a safetensors file."""
    return {name: _Unread(partial(packed.dense, name)) for name in packed.tensors}


class _Unread:
    """A weight that is read when all of it is asked for."""

    def __init__(self, read: Callable[[], torch.Tensor]):
        self._read = read

    def __getitem__(self, _all: object) -> torch.Tensor:
        return self._read()
