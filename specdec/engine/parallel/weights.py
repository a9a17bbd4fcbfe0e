"""A rank's share of a model, read from safetensors: of each weight only the rank's part.

The model is made without weights, then each parameter is read, cut and set; a file is open for one tensor at a time, so
its pages can leave memory. Names are matched by the rules of `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from specdec.engine import attention
from specdec.engine.model_folder import ModelFolder, Progress
from specdec.engine.parallel.split import Cut, Split
from specdec.errors import ModelRefused


def empty_model(name: str, folder: ModelFolder, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Returns the folder's model on the meta device, without weights."""
    model_class = getattr(transformers, folder.config["architectures"][0])
    try:
        config = model_class.config_class.from_pretrained(folder.path, local_files_only=True)
        with torch.device("meta"):
            model: transformers.PreTrainedModel = model_class._from_config(
                config, dtype=dtype, attn_implementation=attention.NAME
            )
    except (OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
        raise ModelRefused(f"{name}: {str(error).strip().splitlines()[0]}") from error
    return model


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
    _fill_buffers(model)


def _load(
    name: str,
    model: transformers.PreTrainedModel,
    folder: ModelFolder,
    paths: Sequence[str],
    cuts: Mapping[str, Cut],
    progress: Progress,
) -> None:
    """Reads these parameters, of those in `cuts` a part only."""
    sources = _sources(model, folder)
    tied = _tied_name(model)
    loaded: dict[str, nn.Parameter] = {}
    for index, path in enumerate(paths):
        source = path if path in sources else tied.get(path, path)
        if source not in sources:
            raise ModelRefused(f"{name}: the weights lack {path}")
        if source not in loaded:
            file, stored_name = sources[source]
            shape = model.get_parameter(source).shape
            weight = _read(name, file, stored_name, cuts.get(source), shape)
            loaded[source] = nn.Parameter(weight.to(model.dtype), requires_grad=False)
        _put(model, path, loaded[source])
        progress("loading weights", (index + 1) / len(paths))


def _sources(model: transformers.PreTrainedModel, folder: ModelFolder) -> dict[str, tuple[Path, str]]:
    """Returns parameter name -> (file, name in it), by the renamings of `transformers`."""
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    expected = dict(model.named_parameters(remove_duplicate=False))
    found = {}
    for file in folder.weight_files:
        try:
            with safe_open(file, "pt") as stored:
                stored_names = list(stored.keys())
        except SafetensorError as error:
            raise ModelRefused(f"{file} is not a safetensors file: {error}") from None
        for stored_name in stored_names:
            path, _ = rename_source_key(stored_name, renamings, [], model.base_model_prefix, expected)
            found[path] = file, stored_name
    return found


def _tied_name(model: transformers.PreTrainedModel) -> Mapping[str, str]:
    """Returns output weight -> embedding weight, if the config ties them; used if the files lack the output weight."""
    if not model.config.tie_word_embeddings:
        return {}
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    paths = {module: path for path, module in model.named_modules()}
    return {f"{paths[output]}.weight": f"{paths[embedding]}.weight"}


def _read(name: str, file: Path, stored_name: str, cut: Cut | None, shape: torch.Size) -> torch.Tensor:
    """Returns a copy of the tensor or of its cut, so that the file can be unmapped."""
    with safe_open(file, "pt") as stored:
        whole = stored.get_slice(stored_name)
        if tuple(whole.get_shape()) != tuple(shape):
            raise ModelRefused(f"{name}: {stored_name} has shape {whole.get_shape()}; it must be {list(shape)}")
        if cut is None:
            everything: torch.Tensor = whole[:] if len(shape) else stored.get_tensor(stored_name)
            return everything.clone()
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


def _put(model: nn.Module, path: str, parameter: nn.Parameter) -> None:
    parent, _, attribute = path.rpartition(".")
    model.get_submodule(parent)._parameters[attribute] = parameter


def _fill_buffers(model: transformers.PreTrainedModel) -> None:
    """Computes buffers that are not loaded, such as rotary frequencies, as `transformers` does after loading."""
    for path, buffer in list(model.named_buffers()):
        parent, _, attribute = path.rpartition(".")
        model.get_submodule(parent)._buffers[attribute] = torch.empty_like(buffer, device="cpu")
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # of transformers, on any parameter
    model.initialize_weights()
