"""A rank's share of a model, read from safetensors: of each weight only the rank's part.

The model is made without weights and checked (`fitting`), then each parameter is read, cut and set; a file is open for
one tensor at a time, so its pages can leave memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn

from specdec.engine.loading.fitting import check_weights, empty_model, fill_buffers, put_parameter
from specdec.engine.loading.model_folder import ModelFolder, Progress
from specdec.engine.parallel.split import Cut, Split
from specdec.errors import refusing


def output_alone(name: str, folder: ModelFolder, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Returns an `empty_model` with the weights of its output layer, whole. Raises ModelRefused if one is missing."""
    model = empty_model(name, folder, dtype)
    output = model.get_output_embeddings()
    (path,) = [path for path, module in model.named_modules() if module is output]
    paths = [f"{path}.{own}" for own, _ in output.named_parameters()]
    _load(name, model, folder, paths, {}, lambda what, share: None)
    return model


def fill(name: str, model: transformers.PreTrainedModel, folder: ModelFolder, split: Split, progress: Progress) -> None:
    """Reads this rank's part of every parameter of an `empty_model`. Raises ModelRefused if one is missing."""
    paths = [path for path, _ in model.named_parameters(remove_duplicate=False)]
    _load(name, model, folder, paths, split.cuts, progress)
    fill_buffers(model)


def _load(
    name: str,
    model: transformers.PreTrainedModel,
    folder: ModelFolder,
    paths: Sequence[str],
    cuts: Mapping[str, Cut],
    progress: Progress,
) -> None:
    """Reads these parameters, of those in `cuts` a part only."""
    sources = check_weights(name, model, folder)
    loaded: dict[str, nn.Parameter] = {}
    for index, path in enumerate(paths):
        source = sources[path]
        if source not in loaded:
            with refusing(str(folder.tensors[source].file)):
                weight = _read(folder, source, cuts.get(path), model.get_parameter(path).shape)
            loaded[source] = nn.Parameter(weight.to(model.dtype), requires_grad=False)
        put_parameter(model, path, loaded[source])
        progress("loading weights", (index + 1) / len(paths))


def _read(folder: ModelFolder, stored_name: str, cut: Cut | None, shape: torch.Size) -> torch.Tensor:
    """Returns a copy of the tensor or of its cut, so that the file can be unmapped."""
    if folder.packed:
        unpacked = folder.packed.dense(stored_name)
        return unpacked if cut is None else _cut(unpacked, cut, shape)
    with safe_open(folder.tensors[stored_name].file, "pt") as stored:
        if cut is not None:
            return _cut(stored.get_slice(stored_name), cut, shape)
        whole: torch.Tensor = stored.get_slice(stored_name)[:] if len(shape) else stored.get_tensor(stored_name)
        return whole.clone()


def _cut(whole: Any, cut: Cut, shape: torch.Size) -> torch.Tensor:
    """Returns a copy of the cut of a tensor, or of one in a file."""
    ranges = [slice(start, end) for start, end in cut.ranges]
    parts = [whole[part] if cut.dimension == 0 else whole[:, part] for part in ranges]
    own_shape = list(shape)
    own_shape[cut.dimension] = cut.size
    weight: torch.Tensor = parts[0].new_zeros(own_shape)
    place = 0
    for part in parts:
        weight.narrow(cut.dimension, place, part.shape[cut.dimension]).copy_(part)
        place += part.shape[cut.dimension]
    return weight
