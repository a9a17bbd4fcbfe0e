"""Weights of a folder into a model that was made without them, whole or one rank's part of each.

Each parameter is read, cut and set after the other; a file is open for one tensor at a time, so its pages can leave
memory. A packed weight is read when a backend takes it: it is in memory once, in the backend's own layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn

from specdec.engine.loading.fitting import check_weights, empty_model, fill_buffers, put_parameter
from specdec.engine.loading.model_folder import ModelFolder, Progress, no_progress
from specdec.engine.loading.stored import PackedFolder
from specdec.engine.packed import GROUP_STEP, PackedLinear, PackedWeight
from specdec.errors import ModelRefused, refusing


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a weight: concatenated half-open ranges of one dimension, then zeros up to `size`."""

    dimension: int
    ranges: tuple[tuple[int, int], ...]
    size: int

    def of(self, whole: Any) -> torch.Tensor:
        """Returns a copy of the part of a tensor, or of one in a file."""
        parts = [whole[start:end] if self.dimension == 0 else whole[:, start:end] for start, end in self.ranges]
        shape = list(parts[0].shape)
        shape[self.dimension] = self.size
        found: torch.Tensor = parts[0].new_zeros(shape)
        place = 0
        for part in parts:
            found.narrow(self.dimension, place, part.shape[self.dimension]).copy_(part)
            place += part.shape[self.dimension]
        return found

    def of_packed(self, weight: PackedWeight) -> PackedWeight:
        """Returns the part of a packed weight; of inputs in smaller groups, if it begins or ends inside one. Raises
        ModelRefused if they would be no whole groups of GROUP_STEP."""
        own, group = self, weight.group
        if self.dimension == 1:
            group = math.gcd(group, *(edge for ends in self.ranges for edge in ends))
            if group % GROUP_STEP:
                limit = f"at multiples of {GROUP_STEP} inputs"
                raise ModelRefused(f"packed weights are cut at the inputs {self.ranges}; they can be only {limit}")
            own = Cut(1, tuple((start // group, end // group) for start, end in self.ranges), self.size // group)
        part_count = weight.group // group
        scales = own.of(weight.scales.repeat_interleave(part_count, 1))
        minima = None if weight.minima is None else own.of(weight.minima.repeat_interleave(part_count, 1))
        return replace(weight, group=group, values=self.of(weight.values), scales=scales, minima=minima)


def fill(
    name: str,
    model: transformers.PreTrainedModel,
    folder: ModelFolder,
    cuts: Mapping[str, Cut],
    progress: Progress,
    keeps_packed: bool,
) -> None:
    """Reads every parameter of an `empty_model`, of those in `cuts` a part. `keeps_packed`: linear layers of packed
    weights become `PackedLinear`. Raises ModelRefused if a weight is missing."""
    _load(name, model, folder, "", cuts, progress, keeps_packed)
    fill_buffers(model)


def output_alone(
    name: str, folder: ModelFolder, dtype: torch.dtype, keeps_packed: bool
) -> transformers.PreTrainedModel:
    """Returns an `empty_model` with the weights of its output layer, whole. Raises ModelRefused if one is missing."""
    model = empty_model(name, folder, dtype)
    _load_module(name, model, folder, model.get_output_embeddings(), keeps_packed)
    return model


def embedding_alone(name: str, folder: ModelFolder, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Returns an `empty_model` with its table of embeddings, whole. Raises ModelRefused if it is missing."""
    model = empty_model(name, folder, dtype)
    _load_module(name, model, folder, model.get_input_embeddings(), keeps_packed=False)
    return model


def _load_module(
    name: str, model: transformers.PreTrainedModel, folder: ModelFolder, module: object, keeps_packed: bool
) -> None:
    """Reads the parameters of one module."""
    (path,) = [path for path, each in model.named_modules() if each is module]
    _load(name, model, folder, path, {}, no_progress, keeps_packed)


def _load(
    name: str,
    model: transformers.PreTrainedModel,
    folder: ModelFolder,
    below: str,
    cuts: Mapping[str, Cut],
    progress: Progress,
    keeps_packed: bool,
) -> None:
    """Reads the parameters whose path begins with `below`."""
    sources = check_weights(name, model, folder)
    if keeps_packed and folder.packed:
        _keep_packed(model, folder.packed, below, sources, cuts, progress)
    paths = [path for path, _ in model.named_parameters(remove_duplicate=False) if path.startswith(below)]
    loaded: dict[str, nn.Parameter] = {}
    for index, path in enumerate(paths):
        source = sources[path]
        if source not in loaded:
            with refusing(str(folder.tensors[source].file)):
                weight = _read(folder, source, cuts.get(path))
            loaded[source] = nn.Parameter(weight.to(model.dtype), requires_grad=False)
        put_parameter(model, path, loaded[source])
        progress("loading weights", (index + 1) / len(paths))


def _keep_packed(
    model: nn.Module,
    packed: PackedFolder,
    below: str,
    sources: Mapping[str, str],
    cuts: Mapping[str, Cut],
    progress: Progress,
) -> None:
    """Replaces the linear layers of packed weights. An embedding that is also the output layer stays as it is."""
    linears = {path: each for path, each in model.named_modules() if isinstance(each, nn.Linear)}
    paths = [path for path in linears if path.startswith(below) and packed.is_packed(sources[f"{path}.weight"])]
    for index, path in enumerate(paths):
        report = partial(progress, "packing weights", (index + 1) / len(paths))
        read = partial(_read_packed, packed, sources[f"{path}.weight"], cuts.get(f"{path}.weight"), report)
        bias = sources.get(f"{path}.bias")
        own_bias = None if bias is None else _part(packed.dense(bias), cuts.get(f"{path}.bias")).to(torch.float32)
        shape, cut = [*linears[path].weight.shape], cuts.get(f"{path}.weight")
        if cut is not None:
            shape[cut.dimension] = cut.size
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, PackedLinear((shape[0], shape[1]), read, own_bias))


def _read_packed(packed: PackedFolder, source: str, cut: Cut | None, report: Callable[[], None]) -> PackedWeight:
    weight = packed.packed(source)
    report()
    return weight if cut is None else cut.of_packed(weight)


def _part(whole: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    return whole if cut is None else cut.of(whole)


def _read(folder: ModelFolder, stored_name: str, cut: Cut | None) -> torch.Tensor:
    """Returns a copy of the tensor or of its cut, so that the file can be unmapped."""
    if folder.packed:
        return _part(folder.packed.dense(stored_name), cut)
    with safe_open(folder.tensors[stored_name].file, "pt") as stored:
        if cut is not None:
            return cut.of(stored.get_slice(stored_name))
        shape = folder.tensors[stored_name].shape
        whole: torch.Tensor = stored.get_slice(stored_name)[:] if shape else stored.get_tensor(stored_name)
        return whole.clone()


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
