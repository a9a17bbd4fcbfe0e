"""Folders of EAGLE-3 heads: both layouts of the hub are read, and what is not understood is refused by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.engine.eagle.config_check import TargetFacts
from specdec.engine.eagle.folder import is_eagle, load_eagle, save_eagle, target_facts
from specdec.engine.heads import Heads, save_heads
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import ModelRefused
from tests.support.eagle_folders import (
    HIDDEN,
    HUB_CONFIG,
    LAYERS,
    OWN_LLAMA,
    SPECULATORS_CONFIG,
    VOCABULARY,
    head_tensors,
    renamed,
    write_head,
)
from tests.support.engine_models import make_tiny_model

TARGET = TargetFacts(HIDDEN, LAYERS, VOCABULARY, VOCABULARY)
IDS = "eagle_aux_hidden_state_layer_ids"


def hub(folder: Path, drop: str = "", **entries: Any) -> Path:
    """A folder of the hub's layout with entries changed, or one dropped."""
    config = {name: value for name, value in (HUB_CONFIG | entries).items() if name != drop}
    return write_head(folder / "head", config, head_tensors())


def of_speculators(folder: Path, within: dict[str, Any] | None = None, **entries: Any) -> Path:
    """A folder of the layout of speculators with entries changed, `within` its Llama configuration."""
    config = SPECULATORS_CONFIG | entries
    if within is not None:
        config["transformer_layer_config"] = OWN_LLAMA | within
    return write_head(folder / "head", config, renamed(head_tensors(), midlayer="layers.0"))


@pytest.mark.parametrize("before", ["midlayer", "layers.0", "model.layers.0", "model.midlayer"])
def test_names_of_every_layout_are_read(tmp_path: Path, before: str) -> None:
    """Claim: the layer's tensors are read under each name that files of the hub have, with the rest also below
    `model`; the head is the same."""
    names = {"midlayer": before}
    if before.startswith("model."):
        names |= {"fc": "model.fc", "norm": "model.norm"}
    found = load_eagle(write_head(tmp_path / "own", HUB_CONFIG, renamed(head_tensors(), **names)), TARGET)
    usual = load_eagle(hub(tmp_path), TARGET).state_dict()
    assert all(torch.equal(weight, usual[name]) for name, weight in found.state_dict().items())


def test_a_saved_head_is_the_head(tmp_path: Path) -> None:
    """Claim: saved and loaded, a head is equal in configuration, ids and weights, but for bfloat16; that of every
    layout; with embeddings and layers of its own, and with the whole vocabulary, of which no d2t is written."""
    tensors = head_tensors(features=2, hidden=48, target_hidden=HIDDEN)
    tensors["embed_tokens.weight"] = torch.randn(VOCABULARY, 48)
    sizes = {"hidden_size": 48, "head_dim": 16, "target_hidden_size": HIDDEN, IDS: [3, LAYERS]}
    narrow = write_head(tmp_path / "narrow", HUB_CONFIG | sizes | {"num_aux_hidden_states": 2}, tensors)
    whole = {name: each for name, each in head_tensors().items() if name not in ("d2t", "t2d")}
    whole["lm_head.weight"] = torch.randn(VOCABULARY, HIDDEN)
    everything = write_head(tmp_path / "whole", HUB_CONFIG | {"draft_vocab_size": None}, whole)
    for index, folder in enumerate((hub(tmp_path / "hub"), of_speculators(tmp_path / "other"), narrow, everything)):
        head = load_eagle(folder, TARGET)
        (out := tmp_path / str(index)).mkdir()
        save_eagle(head, out)
        again = load_eagle(out, TARGET)
        assert is_eagle(out) and again.config == head.config and torch.equal(again.target_ids, head.target_ids)
        for name, weight in head.state_dict().items():
            assert torch.equal(again.state_dict()[name], weight.bfloat16().float()), name
        assert len(again.state_dict()) == len(head.state_dict())


def test_medusa_heads_are_no_eagle(tmp_path: Path) -> None:
    """Claim: a folder that `specdec distill --heads` writes is told from those of the hub."""
    save_heads(Heads(1, 8), tmp_path, "digest")
    assert not is_eagle(tmp_path) and is_eagle(hub(tmp_path))


def test_facts_are_those_of_the_target(tmp_path: Path) -> None:
    """Claim: of a target's folder, also of an architecture with other names, and its table is wider than its ids."""
    folder = open_model_folder(str(make_tiny_model(tmp_path / "gpt2", "gpt2")))
    facts = target_facts(folder)
    assert (facts.hidden_size, facts.layer_count) == (64, 3)
    assert facts.token_count == folder.token_string_count < facts.vocabulary_size
    with pytest.raises(ModelRefused, match="encoder-decoder model: EAGLE-3 heads are for decoders"):
        target_facts(replace(folder, beginning=(0,)))


WRONG_ENTRIES: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["LlamaForCausalLM"]}, 'architectures is ["LlamaForCausalLM"]; it must be one of LlamaFor'),
    ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, 'architectures is ["Eagle3Qwen3ForCausalLM"]; it must be one of'),
    ({"num_hidden_layers": 2}, "num_hidden_layers is 2; it must be 1"),
    ({"hidden_size": None}, "hidden_size is null; it must be present"),
    ({"hidden_size": 0}, "hidden_size is 0; it must be an integer from 1 to"),
    ({"hidden_size": 128, "head_dim": 16}, f"hidden_size is 128; it must be the target's, {HIDDEN}"),
    ({"target_hidden_size": 32}, f"target_hidden_size is 32; it must be the target's, {HIDDEN}"),
    ({"target_hidden_size": "64"}, 'target_hidden_size is "64"; it must be an integer from 1 to'),
    ({"vocab_size": 61}, f"vocab_size is 61; it must be the target's, {VOCABULARY}"),
    ({"draft_vocab_size": 61}, f"draft_vocab_size is 61; it must be an integer from 1 to {VOCABULARY}, or null"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must be a divisor of num_attention_heads, 4"),
    ({"head_dim": 15}, "head_dim is 15; it must be even"),
    ({"model_type": "qwen3"}, 'model_type is "qwen3"; it must be "llama"'),
    ({"hidden_act": "tanh"}, 'hidden_act is "tanh"; it must be one of silu'),
    ({"attention_bias": True}, "attention_bias is true; it must be false or absent"),
    ({"fc_norm": True}, "fc_norm is true; it must be false or absent"),
    ({"norm_output": True}, "norm_output is true; it must be false or absent"),
    ({"parallel_drafting": True}, "parallel_drafting is true; it must be false or absent"),
    ({"logit_scale": 0.5}, "logit_scale is 0.5; it must be 1 or absent"),
    ({"quantization_config": {"bits": 4}}, 'quantization_config is {"bits": 4}; it must be null or absent'),
    ({"norm_before_residual": 1}, "norm_before_residual is 1; it must be true or false"),
    ({"mask_token_id": 3}, "mask_token_id is 3; it must be absent: it is no entry of an EAGLE-3 head"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 'rope_scaling.rope_type is "dynamic"; it must be one'),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor is 0.5; it must be 1"),
    ({"eagle_config": [1]}, "eagle_config is [1]; it must be an object or null"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state is false; it must be true"),
    ({"eagle_config": {"parallel": 1}}, "eagle_config.parallel is 1; it must be absent"),
    ({"eagle_config": {IDS: [2, 1, 3]}}, f"{IDS} is [2, 1, 3]; it must be a list of 1 to 8 ascending layers"),
    (
        {IDS: [1, 2, 3], "eagle_config": {IDS: [1, 2, 4]}},
        f"eagle_config.{IDS} is [1, 2, 4]; it must be as {IDS} beside",
    ),
    ({IDS: [1, 2, 10]}, f"{IDS} is [1, 2, 10]; it must be of layers from 0 to the target's {LAYERS}"),
    ({IDS: [1, "2", 3]}, f'{IDS} is [1, "2", 3]; it must be a list'),
    ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4; it must be 3, the number of layers"),
]


@pytest.mark.parametrize(("entries", "reason"), WRONG_ENTRIES)
def test_an_entry_that_is_not_understood_is_refused(tmp_path: Path, entries: dict[str, Any], reason: str) -> None:
    """Claim: a head that is another's, or of which an entry says what `EagleHead` does not compute, is refused by file,
    field, value and limit in one line: a head that runs with other results proposes badly without a word."""
    with pytest.raises(ModelRefused) as refused:
        load_eagle(hub(tmp_path, **entries), TARGET)
    assert reason in str(refused.value) and "config.json: " in str(refused.value) and "\n" not in str(refused.value)


def test_entries_of_speculators_are_refused_by_their_place(tmp_path: Path) -> None:
    """Claim: the same of the other layout, whose Llama entries lie one level deeper; another algorithm is refused."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"speculators_model_type": "peagle"}, 'speculators_model_type is "peagle"; it must be "eagle3"'),
        ({"transformer_layer_config": None}, "transformer_layer_config is null; it must be an object"),
        ({"within": {"sinks": 4}}, "transformer_layer_config.sinks is 4; it must be absent"),
        ({"within": {"mlp_bias": True}}, "transformer_layer_config.mlp_bias is true; it must be false"),
        ({"norm_before_fc": True}, "norm_before_fc is true; it must be false or absent"),
        ({"hidden_size": 64}, "hidden_size is 64; it must be absent"),
    ]
    for entries, reason in cases:
        with pytest.raises(ModelRefused) as refused:
            load_eagle(of_speculators(tmp_path, **entries), TARGET)
        assert reason in str(refused.value), refused.value


def test_a_target_of_few_layers_needs_them_named(tmp_path: Path) -> None:
    """Claim: without layer ids a head reads the default ones, which a small target does not have."""
    with pytest.raises(ModelRefused, match=f"{IDS} is null; it must be present for a target of 4 layers"):
        load_eagle(hub(tmp_path), replace(TARGET, layer_count=4))
    nested = load_eagle(hub(tmp_path, eagle_config={IDS: [0, 2, 4]}), replace(TARGET, layer_count=4))
    assert nested.config.aux_layer_ids == (0, 2, 4)


def changed(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The tensors of a head with some replaced or, as None, left out; "__" stands for a dot."""
    found = head_tensors() | {name.replace("__", "."): each for name, each in tensors.items()}
    return {name: each for name, each in found.items() if each is not None}


def moved(name: str, index: int, value: int) -> torch.Tensor:
    tensor: torch.Tensor = head_tensors()[name]
    tensor[index] = value
    return tensor


WRONG_TENSORS: list[tuple[dict[str, torch.Tensor], str]] = [
    (changed(fc__weight=None), "the weights lack fc.weight"),
    (changed(fc__weight=torch.zeros(HIDDEN, 2 * HIDDEN)), "fc.weight has the shape [64, 128]; it must be [64, 192]"),
    (changed(midlayer__hidden_norm__weight=None), "the weights lack midlayer.hidden_norm.weight"),
    (changed(lm_head__weight=torch.zeros(9, HIDDEN, dtype=torch.int8)), 'lm_head.weight has the type "I8"; it must'),
    (changed(fc_norm__0__weight=torch.ones(HIDDEN)), "fc_norm.0.weight is no weight of an EAGLE-3 head"),
    (changed(midlayer__self_attn__q_proj__bias=torch.ones(64)), "midlayer.self_attn.q_proj.bias is no weight of"),
    (changed(layers__0__hidden_norm__weight=torch.ones(64)), "are the same weight"),
    (changed(d2t=None), "the weights lack d2t, and the head proposes 9 of 60 tokens"),
    (changed(d2t=torch.zeros(8, dtype=torch.int64)), "d2t has the shape [8]; it must be [9] by config.json"),
    (changed(d2t=torch.zeros(9)), 'd2t has the type "F32"; it must be one of I64, I32'),
    (changed(d2t=moved("d2t", 8, 52)), "d2t has the target id of token 8, 60; it must be from 0 to 59"),
    (changed(d2t=moved("d2t", 0, 3)), "d2t has the different target ids 8; it must be 9, one for each token"),
    (changed(t2d=moved("t2d", 5, 1)), "t2d has the entry of token 5, true; it must be false by d2t"),
    (changed(t2d=torch.ones(61, dtype=torch.bool)), "t2d has the shape [61]; it must be [60] by config.json"),
]


@pytest.mark.parametrize(("tensors", "reason"), WRONG_TENSORS)
def test_a_tensor_that_does_not_fit_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a weight that is missing, too many, of another shape or type, and a map of tokens that is none, are
    refused by name; nothing of the head is made before, but on the meta device."""
    made: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", lambda *_: made.append("loaded"))
    with pytest.raises(ModelRefused) as refused:
        load_eagle(write_head(tmp_path / "head", HUB_CONFIG, tensors), TARGET)
    assert reason in str(refused.value) and "\n" not in str(refused.value) and not made


def test_a_narrower_head_needs_embeddings(tmp_path: Path) -> None:
    """Claim: a head of another hidden size cannot read the target's embeddings; with its own it loads."""
    sizes = {"hidden_size": 48, "head_dim": 16, "target_hidden_size": HIDDEN}
    tensors = head_tensors(hidden=48)
    with pytest.raises(ModelRefused, match="lack embed_tokens.weight, and the head has hidden_size 48, the target 64"):
        load_eagle(write_head(tmp_path / "head", HUB_CONFIG | sizes, tensors), TARGET)
    tensors["embed_tokens.weight"] = torch.randn(VOCABULARY, 48)
    assert load_eagle(write_head(tmp_path / "head", HUB_CONFIG | sizes, tensors), TARGET).embed_tokens is not None


def test_pickles_and_broken_files_are_refused(tmp_path: Path) -> None:
    """Claim: a folder with pickled weights alone, one without weights and a cut file are refused, as models are."""
    folder = hub(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="only safetensors weights are loaded"):
        load_eagle(folder, TARGET)
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ModelRefused, match="is not a whole safetensors file"):
        load_eagle(folder, TARGET)
    (folder / "config.json").write_text(json.dumps([]))
    with pytest.raises(ModelRefused, match="it must hold a JSON object"):
        load_eagle(folder, TARGET)
