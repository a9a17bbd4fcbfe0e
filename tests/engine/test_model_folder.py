"""The refusals of `load_model`, by name and in one line, and the values it reads from a folder.

A model that runs but answers differently is worse than one that does not run, so every feature that is not supported
is refused before a weight is read. Nothing in a folder is run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.engine.loading.architectures import check_supported
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import ConfigError, ModelRefused
from tests.support.engine_models import Driver, make_tiny_model

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def edit_json(file: Path, **entries: object) -> None:
    value = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps(value | entries), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)


def refusal(folder: Path | str) -> str:
    with pytest.raises(ModelRefused) as caught:
        load_model(str(folder))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_incomplete_and_unsafe_folders_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    """Claim: a missing folder, config, tokenizer or weights, pickled and cut weights and broken JSON are each named.

    Source: "one line that says what to do", and reliability.md, unsafe loading. Conclusive: each fault is planted alone
    and the message must name its file.
    """
    assert "no such folder" in refusal(tmp_path / "nowhere")
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert "tokenizer.json" in refusal(folder)
    (tmp_path / "tokenizer.json").rename(folder / "tokenizer.json")
    weights = (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert "no model.safetensors" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    assert "pytorch_model.bin" in refusal(folder)
    edit_json(folder / "model.safetensors.index.json", weight_map={"a": "../model.safetensors"})
    assert "'../model.safetensors'" in refusal(folder)
    (folder / "model.safetensors.index.json").unlink()
    whole = weights.rename(folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:7])
    assert "header" in refusal(folder)
    (folder / "model.safetensors").write_bytes(whole)
    (folder / "config.json").write_text("{", encoding="utf-8")
    assert "config.json is not valid JSON" in refusal(folder)
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not supported; supported: LlamaForCausalLM"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration is not supported"),
        ({"architectures": ["OwnModel"], "auto_map": {"AutoModelForCausalLM": "own.OwnModel"}}, "never run"),
        ({"architectures": None}, "exactly one"),
        ({"architectures": ["LlamaForCausalLM", "GPT2LMHeadModel"]}, "exactly one"),
        ({"hidden_act": "tanh"}, "'tanh' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer type 'chunked_attention'"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "later positions"),
        ({"architectures": ["CohereForCausalLM"], "use_qk_norm": True}, "use_qk_norm"),
        ({"is_causal": False}, "is_causal"),
        ({"architectures": ["GPT2LMHeadModel"], "add_cross_attention": True}, "cross attention"),
        ({"architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_fast"}, "'gelu_fast'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(entries: dict, named: str) -> None:
    """Claim: every architecture and feature that no test compares with `transformers` is refused by its name.

    Source: "every other architecture is refused by name until it is proven". Conclusive: the config passes without the
    planted entry.
    """
    check_supported("model", CONFIG)
    with pytest.raises(ModelRefused, match="model") as caught:
        check_supported("model", CONFIG | entries)
    assert named in str(caught.value)


def test_weights_that_do_not_fit_are_refused(folder: Path) -> None:
    """Claim: a folder whose weights lack a tensor is refused, not filled with random numbers.

    Source: `transformers` fills missing tensors and only warns. Conclusive: one tensor is taken away and named.
    """
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.0.mlp.up_proj.weight" in refusal(folder)


def test_settings_are_refused_by_name(folder: Path) -> None:
    """Claim: a dtype or device that is not supported is refused, with the supported ones.

    Source: `load_model`. Conclusive: float64, which `transformers` supports, is among them.
    """
    with pytest.raises(ConfigError, match="float64.*auto, float32, bfloat16, float16"):
        load_model(str(folder), dtype="float64")
    with pytest.raises(ConfigError, match="cuda"):
        load_model(str(folder), device="cuda")


def test_the_description_is_read_from_the_folder(folder: Path) -> None:
    """Claim: end ids come from generation_config, one or a list, else config; ids without a string are cut off.

    Source: "end ids come from generation_config (a list)"; design section 4, some models pad the output layer.
    Conclusive: the output layer is wider than the tokenizer, and logits end at the tokenizer's last id.
    """
    driver = Driver.load(folder)
    described = driver.model.description
    assert (described.vocabulary_size, described.positions_max, described.dtype) == (288, 512, "float32")
    assert driver.feed(driver.open(4), [1, 2]).shape == (2, 288)
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert open_model_folder(str(folder)).end_token_ids == (0,)
    for value, expected in ((7, (7,)), ([3, 5], (3, 5)), (None, (0,))):
        edit_json(folder / "generation_config.json", eos_token_id=value)
        assert open_model_folder(str(folder)).end_token_ids == expected


def test_the_digest_covers_config_and_weights(folder: Path, tmp_path: Path) -> None:
    """Claim: two folders have one digest exactly when config and weights are equal, whatever their names.

    Source: reliability.md, digests differ. Conclusive: one bit of one weight and one config entry are changed.
    """
    shares: list[float] = []
    first = open_model_folder(str(folder)).digest(lambda what, share: shares.append(share))
    assert shares == sorted(shares) and shares[-1] == 1
    moved = folder.rename(tmp_path / "moved")
    assert open_model_folder(str(moved)).digest() == first
    content = bytearray((moved / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (moved / "model.safetensors").write_bytes(bytes(content))
    second = open_model_folder(str(moved)).digest()
    edit_json(moved / "config.json", rms_norm_eps=1e-5)
    assert len({first, second, open_model_folder(str(moved)).digest()}) == 3


def test_auto_keeps_the_weights_type(folder_of: Callable[[str], Path], folder: Path) -> None:
    """Claim: "auto" is bfloat16 for the shipped pair, also as a draft, float16 for float16 weights, and float32 for a
    type that the engine does not compute in.

    Source: `load_model`. Conclusive: the config's own entry is the only difference.
    """
    for is_target in (True, False):
        assert load_model(str(folder_of("draft")), has_stable_rows=is_target).description.dtype == "bfloat16"
    for stored, expected in (("float16", "float16"), ("float64", "float32")):
        edit_json(folder / "config.json", dtype=stored)
        assert load_model(str(folder)).description.dtype == expected
    assert torch.get_default_dtype() == torch.float32


def test_weights_that_are_not_the_manifests_are_refused(folder: Path) -> None:
    """Claim: where a folder states SHA-256 sums, weights that differ in one bit are not served.

    Source: reliability.md, unsafe loading. Conclusive: the same manifest passes before the bit is changed.
    """
    weights = folder / "model.safetensors"
    (folder / "SHA256SUMS").write_text(f"{hashlib.sha256(weights.read_bytes()).hexdigest()}  model.safetensors\n")
    open_model_folder(str(folder)).digest()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(ModelRefused, match="SHA256SUMS"):
        open_model_folder(str(folder)).digest()
