"""Whether the weights of a folder are those of its configuration, before one is read.

The model is made without weights, and each parameter compared with the headers of the files. Names are matched by the
rules of `transformers`. What its configuration classes refuse is refused here too: they know the types of the entries
that `config_check` does not name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from specdec.engine import attention
from specdec.engine.loading.architectures import architecture_of
from specdec.engine.loading.model_folder import ModelFolder
from specdec.engine.loading.stored import PLAIN_TYPES
from specdec.errors import ModelRefused, refusing


def class_of(folder: ModelFolder) -> Any:
    """Returns the class of `transformers` that a checked folder names."""
    return getattr(transformers, architecture_of(str(folder.path), folder.config).class_name)


def config_of(folder: ModelFolder) -> Any:
    """Returns the configuration of a checked folder as `transformers` has it. Raises ModelRefused."""
    with refusing(str(folder.path / "config.json")):
        return class_of(folder).config_class.from_dict(folder.config)


def empty_model(name: str, folder: ModelFolder, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Returns the folder's model on the meta device, without weights. Raises ModelRefused."""
    config = config_of(folder)
    with refusing(name), torch.device("meta"):
        model: transformers.PreTrainedModel = class_of(folder)._from_config(
            config, dtype=dtype, attn_implementation=attention.NAME
        )
    return model


def check_weights(name: str, model: transformers.PreTrainedModel, folder: ModelFolder) -> Mapping[str, str]:
    """Returns parameter of an `empty_model` -> name of its tensor in the folder's files. Raises ModelRefused, naming
    the tensor, if one is missing or has another shape or no floating-point type."""
    stored = stored_names(model, folder)
    tied = tied_name(model, folder)
    found = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        source = path if path in stored else tied.get(path, path)
        if source not in stored:
            unused = sorted(stored.keys() - dict(model.named_parameters(remove_duplicate=False)).keys())
            instead = f"; they have {stored[unused[0]]}, which the model does not" if unused else ""
            raise ModelRefused(f"{name}: the weights lack {path}{instead}")
        tensor = folder.tensors[stored[source]]
        place = f"{tensor.file}: {stored[source]}"
        if tensor.shape != tuple(parameter.shape):
            raise ModelRefused(
                f"{place} has shape {list(tensor.shape)}; by config.json it must be {list(parameter.shape)}"
            )
        if tensor.dtype not in PLAIN_TYPES and not folder.packed:
            raise ModelRefused(f"{place} has type {tensor.dtype}; it must be one of {', '.join(PLAIN_TYPES)}")
        found[path] = stored[source]
    return found


def stored_names(model: transformers.PreTrainedModel, folder: ModelFolder) -> dict[str, str]:
    """Returns parameter name -> name in the files, by the renamings of `transformers`."""
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    expected: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    prefix = model.base_model_prefix
    return {rename_source_key(name, renamings, [], prefix, expected)[0]: name for name in folder.tensors}


def tied_name(model: transformers.PreTrainedModel, folder: ModelFolder) -> Mapping[str, str]:
    """Returns output weight -> embedding weight, if the config ties them; used if the files lack the output weight. Of
    an encoder-decoder model also the embeddings of both stacks, which are one in any case."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    paths = {module: path for path, module in model.named_modules()}
    tied = {f"{paths[output]}.weight": f"{paths[embedding]}.weight"}
    if folder.has_encoder:  # its class says that it ties, whatever the folder does
        is_tied = folder.config.get("tie_word_embeddings", True)
        return {each: name for each, name in model.all_tied_weights_keys.items() if is_tied or each not in tied}
    return tied if model.config.tie_word_embeddings else {}


def put_parameter(model: nn.Module, path: str, parameter: nn.Parameter) -> None:
    """Sets a parameter of an `empty_model`."""
    parent, _, attribute = path.rpartition(".")
    model.get_submodule(parent)._parameters[attribute] = parameter


def fill_buffers(model: transformers.PreTrainedModel) -> None:
    """Computes buffers that are not loaded, such as rotary frequencies, as `transformers` does after loading."""
    for path, buffer in list(model.named_buffers()):
        parent, _, attribute = path.rpartition(".")
        model.get_submodule(parent)._buffers[attribute] = torch.empty_like(buffer, device="cpu")
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # of transformers, on any parameter
    model.initialize_weights()
