"""Folders of EAGLE-3 heads: the layouts of the hub in, the layout LlamaForCausalLMEagle3 out.

Everything is checked from config.json and the headers of the weights before a tensor is made. Tensors are those of the
layer, as `midlayer` or `layers.0`, of `fc`, `norm` and `lm_head`; `embed_tokens`, if the head does not read the
target's; `d2t`, what is added to a draft token's own id to give the target's; and `t2d`, which of the target's tokens
those are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.engine.eagle.config_check import ARCHITECTURES, COUNT_ENTRY, IDS_ENTRY, TargetFacts, head_config
from specdec.engine.eagle.network import FEATURE_LAYERS, EagleConfig, EagleHead
from specdec.engine.heads import CONFIG_FILE as MEDUSA_FILE
from specdec.engine.loading.fitting import config_of
from specdec.engine.loading.folder_files import WEIGHTS_FILE
from specdec.engine.loading.model_folder import ModelFolder, stored_tensors, weight_files_of
from specdec.engine.loading.stored import PLAIN_TYPES, StoredTensor, read_tensor, refuse_tensor
from specdec.errors import ModelRefused
from specdec.folders import has_file, read_json

CONFIG_FILE = "config.json"
OFFSETS, MEMBERS, EMBEDDINGS = "d2t", "t2d", "embed_tokens.weight"
ID_TYPES, MEMBER_TYPES = ("I64", "I32"), ("BOOL", "U8")


def is_eagle(folder: Path) -> bool:
    """Whether a folder of heads is one of the hub's: it has a config.json, which Medusa heads of `specdec distill` do
    not have. Raises ModelRefused for a broken file."""
    return has_file(folder / CONFIG_FILE) and not has_file(folder / MEDUSA_FILE)


def target_facts(folder: ModelFolder) -> TargetFacts:
    """Returns what a head of the target in a folder must fit. Raises ModelRefused for an encoder-decoder target, whose
    residual stream is none that an EAGLE-3 head reads."""
    if folder.has_encoder:
        raise ModelRefused(f"{folder.path} is an encoder-decoder model: EAGLE-3 heads are for decoders")
    config = config_of(folder)
    served = min(folder.token_string_count, config.vocab_size)
    return TargetFacts(config.hidden_size, config.num_hidden_layers, config.vocab_size, served)


def load_eagle(folder: Path, target: TargetFacts) -> EagleHead:
    """Returns the head in a folder, float32 and frozen. It proposes only ids that the target serves, ascending: rows of
    the output layer are put in this order, and those for others are dropped. Raises ModelRefused, in one line with
    file, field or tensor, value and limit."""
    config = head_config(folder / CONFIG_FILE, read_json(folder / CONFIG_FILE), target)
    stored = stored_tensors(weight_files_of(folder, str(folder)))
    names = _names(stored)
    _check_tensors(folder, config, stored, names, target)
    target_ids = _target_ids(config, stored, names)
    head = EagleHead(config, target_ids, EMBEDDINGS in names)
    head.load_state_dict({name: read_tensor(stored, names[name]).float() for name in head.state_dict()})
    order = target_ids.argsort()
    kept = order[target_ids[order] < target.token_count]
    if len(kept) == 0:
        raise ModelRefused(f"{folder} proposes no token that the target serves, ids below {target.token_count}")
    return _with_tokens(head, kept).requires_grad_(False).eval()


def save_eagle(head: EagleHead, folder: Path) -> None:
    """Writes a folder of the layout LlamaForCausalLMEagle3 in bfloat16. Layer ids are written where vLLM reads them;
    SGLang takes its own default, which is `default_layers`."""
    config = head.config
    tensors = {
        _hub_name(name): value.detach().cpu().bfloat16().contiguous() for name, value in head.state_dict().items()
    }
    if config.draft_vocabulary_size != config.vocabulary_size:
        ids = head.target_ids.cpu()
        tensors[OFFSETS] = ids - torch.arange(len(ids))
        tensors[MEMBERS] = torch.zeros(config.vocabulary_size, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(0o644)  # written readable by its owner alone
    (folder / CONFIG_FILE).write_text(json.dumps(_entries(config), indent=1) + "\n", encoding="utf-8")


def _entries(config: EagleConfig) -> dict[str, Any]:
    """The config.json of a head."""
    entries: dict[str, Any] = {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        "dtype": "bfloat16",
        "num_hidden_layers": 1,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.head_count,
        "num_key_value_heads": config.kv_head_count,
        "head_dim": config.head_size,
        "hidden_act": config.activation,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(config.rope_scaling),
        "max_position_embeddings": config.positions_max,
        "vocab_size": config.vocabulary_size,
        "draft_vocab_size": config.draft_vocabulary_size,
        "norm_before_residual": config.norm_before_residual,
        "tie_word_embeddings": False,
        IDS_ENTRY: list(config.aux_layer_ids),
    }
    if len(config.aux_layer_ids) != FEATURE_LAYERS:
        entries[COUNT_ENTRY] = len(config.aux_layer_ids)
    return entries


def _hub_name(name: str) -> str:
    """The name of a parameter in files of the layout LlamaForCausalLMEagle3."""
    return f"mid{name}" if name.startswith("layer.") else name


def _own_name(name: str) -> str:
    """The name of a parameter by that in a file of any layout; d2t and t2d as they are."""
    plain = name.removeprefix("model.")
    for prefix in ("midlayer.", "layers.0."):
        if plain.startswith(prefix):
            return f"layer.{plain.removeprefix(prefix)}"
    return plain


def _names(stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Returns parameter name -> name in the files. Raises ModelRefused if two names are one parameter's."""
    found: dict[str, str] = {}
    for name in stored:
        own = _own_name(name)
        if own in found:
            raise ModelRefused(f"{stored[name].file}: {name} and {found[own]} are the same weight")
        found[own] = name
    return found


def _check_tensors(
    folder: Path, config: EagleConfig, stored: Mapping[str, StoredTensor], names: Mapping[str, str], target: TargetFacts
) -> None:
    """Raises ModelRefused unless the files hold a head's tensors of these sizes, and no others."""
    with torch.device("meta"):
        wanted = EagleHead(config, torch.empty(0), EMBEDDINGS in names).state_dict()
    maps = {OFFSETS: (ID_TYPES, [config.draft_vocabulary_size]), MEMBERS: (MEMBER_TYPES, [config.vocabulary_size])}
    for own, name in names.items():
        if own not in wanted and own not in maps:
            raise ModelRefused(f"{stored[name].file}: {name} is no weight of an EAGLE-3 head of config.json")
    lacking = [own for own in wanted if own not in names]
    if lacking:
        raise ModelRefused(f"{folder}: the weights lack {_hub_name(lacking[0])}")
    for own, name in names.items():
        types, shape = maps[own] if own in maps else (PLAIN_TYPES, list(wanted[own].shape))
        if stored[name].dtype not in types:
            refuse_tensor(stored, name, "type", stored[name].dtype, f"one of {', '.join(types)}")
        if list(stored[name].shape) != shape:
            refuse_tensor(stored, name, "shape", list(stored[name].shape), f"{shape} by config.json")
    if OFFSETS not in names and config.draft_vocabulary_size != config.vocabulary_size:
        sizes = f"{config.draft_vocabulary_size} of {config.vocabulary_size} tokens"
        raise ModelRefused(f"{folder}: the weights lack {OFFSETS}, and the head proposes {sizes}")
    if EMBEDDINGS not in names and config.hidden_size != target.hidden_size:
        sizes = f"hidden_size {config.hidden_size}, the target {target.hidden_size}"
        raise ModelRefused(f"{folder}: the weights lack {EMBEDDINGS}, and the head has {sizes}")


def _target_ids(config: EagleConfig, stored: Mapping[str, StoredTensor], names: Mapping[str, str]) -> Tensor:
    """Returns the target's ids of the draft tokens. Raises ModelRefused if they are no different ids of the target, or
    not those of `t2d`."""
    ids = torch.arange(config.draft_vocabulary_size)
    if OFFSETS in names:
        name = names[OFFSETS]
        ids = ids + read_tensor(stored, name).long()
        outside = ((ids < 0) | (ids >= config.vocabulary_size)).nonzero()[:, 0].tolist()
        if outside:
            what = f"target id of token {outside[0]},"
            refuse_tensor(stored, name, what, int(ids[outside[0]]), f"from 0 to {config.vocabulary_size - 1}")
        if len(ids.unique()) < len(ids):
            refuse_tensor(stored, name, "different target ids", len(ids.unique()), f"{len(ids)}, one for each token")
    if MEMBERS in names:
        members = read_tensor(stored, names[MEMBERS]).bool()
        expected = torch.zeros(config.vocabulary_size, dtype=torch.bool).index_fill_(0, ids, True)
        differing = (members != expected).nonzero()[:, 0].tolist()
        if differing:
            token, wanted = differing[0], "true" if expected[differing[0]] else "false"
            what = f"entry of token {token},"
            refuse_tensor(stored, names[MEMBERS], what, bool(members[token]), f"{wanted} by {OFFSETS}")
    return ids


def _with_tokens(head: EagleHead, kept: Tensor) -> EagleHead:
    """Returns the head with these of its tokens, in this order, [kept] int64."""
    if not torch.equal(kept, torch.arange(len(head.target_ids))):
        head.config = replace(head.config, draft_vocabulary_size=len(kept))
        head.target_ids = head.target_ids[kept]
        head.lm_head.weight = torch.nn.Parameter(head.lm_head.weight[kept])
        head.lm_head.out_features = len(kept)
    return head
