"""Folders of packed weights in safetensors files: each layout means what it says, and what is not understood is
refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from specdec.engine.loading.folder_files import WEIGHTS_FILE
from specdec.engine.loading.model_folder import open_model_folder
from specdec.engine.loading.schemes import read_scheme
from specdec.errors import ModelRefused
from tests.support.compressed_folders import LAYOUTS, pack_folder, scheme, words
from tests.support.engine_models import Driver, make_tiny_model, random_tokens
from tests.support.packed_folders import Tensors, change_tensors, check_served


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("plain"), "llama", num_hidden_layers=2, intermediate_size=160)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_logits_and_texts_are_those_that_a_layout_means(layout: str, plain: Path, tmp_path: Path) -> None:
    """Claim: each weight is scale times (integer - zero point), or times a number of FP8, once rounded, also as a
    `PackedWeight`; logits and greedy text are those of `transformers` with these weights.

    Source: the layouts' pages. Conclusive: the test packs by its own code, in float64, with another scale for each
    group, row or block, and all values of a number; rows and blocks do not divide all sizes.
    """
    meant = pack_folder(plain, tmp_path / "packed", layout)
    folder = open_model_folder(str(tmp_path / "packed"))
    assert folder.packed
    assert folder.tensors.keys() == meant.keys()
    for name, weight in meant.items():
        assert torch.equal(folder.packed.dense(name), weight.to(torch.float32)), name
        if folder.packed.is_packed(name):
            assert torch.equal(folder.packed.packed(name).dense(), weight.to(torch.float32)), name
    one = "model.layers.0.mlp.down_proj.weight"
    _, _, kind, bits, group, has_zeros, dtype = LAYOUTS[layout]
    assert folder.packed.is_packed(one) != (layout == "fp8-odd-blocks" or (has_zeros and dtype is torch.float32))
    label = {"float8": "F8_E4M3", "mxfp4": "MXFP4"}.get(kind, f"I{bits}")
    assert folder.packed.format == f"{LAYOUTS[layout][0]} {label}"
    check_served(plain, tmp_path / "packed", meant, folder.packed.format)


@pytest.mark.parametrize("writer", ["the test", "float", "ue8m0"])
def test_logits_of_float8_blocks_are_those_of_transformers_on_the_folder(
    writer: str, plain: Path, tmp_path: Path
) -> None:
    """Claim: a folder of FP8 weights by block has the weights, bit for bit, and the logits that `transformers` has of
    the same folder, written by the test or by `transformers` itself with either format of scales.

    Source: `transformers`, which unpacks it itself. Conclusive: no code of the reader has a part in the reference.
    """
    folder = tmp_path / "packed"
    pack_folder(plain, folder, "fp8-even-blocks")
    if writer != "the test":
        folder = rewritten(folder, tmp_path / writer, writer)
    reference = unpacked(folder)
    own = open_model_folder(str(folder))
    assert own.packed and own.packed.format == "fp8 F8_E4M3"
    for name, weight in reference.state_dict().items():
        assert torch.equal(own.packed.dense(name), weight), name
    driver, tokens = Driver.load(folder, "float32"), random_tokens(60, 1)
    with torch.inference_mode():
        expected = reference.eval()(torch.tensor([tokens])).logits[0, :, :288]
    torch.testing.assert_close(driver.feed(driver.open(60), tokens), expected, rtol=1e-4, atol=1e-4)


def unpacked(folder: Path) -> transformers.PreTrainedModel:
    """A folder of FP8 weights, unpacked by `transformers`, which saves it packed."""
    config = transformers.FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)


def set_scales(folder: Path, scale_format: str) -> None:
    """Writes the entry of `transformers` for FP8 weights into a folder's configuration."""
    config = transformers.FineGrainedFP8Config(weight_block_size=(32, 32), scale_fmt=scale_format)
    file = folder / "config.json"
    entries = json.loads(file.read_text(encoding="utf-8")) | {"quantization_config": config.to_dict()}
    file.write_text(json.dumps(entries), encoding="utf-8")


def rewritten(source: Path, folder: Path, scale_format: str) -> Path:
    """A folder as `transformers` saves it, without the entry for FP8 weights, and the entry."""
    set_scales(source, scale_format)
    unpacked(source).save_pretrained(folder)
    set_scales(folder, scale_format)
    types = {weight.dtype for weight in load_file(folder / WEIGHTS_FILE).values()}
    assert torch.float8_e4m3fn in types and (torch.float8_e8m0fnu in types) == (scale_format == "ue8m0")
    shutil.copy(source / "tokenizer.json", folder)
    return folder


def test_words_hold_the_first_value_in_their_lowest_bits(plain: Path, tmp_path: Path) -> None:
    """Claim: the test's own packing is that of the layout. Conclusive: words written out by hand."""
    assert words(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9]]), 4).tolist() == [[0x87654321 - (1 << 32), 9]]
    assert words(torch.tensor([[1, 2, 3, 255]]), 8).tolist() == [[0xFF030201 - (1 << 32)]]


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("gptq", "quantization_config is"),
        ({"quant_method": "mxfp4"}, 'quant_method is "mxfp4"'),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size is [0, 128]"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128]"),
        (scheme("w4-groups") | {"format": "marlin-24"}, 'format is "marlin-24"'),
        (scheme("w4-groups") | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
        (scheme("w4-groups") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is"),
        (scheme("w4-groups") | {"config_groups": None}, "config_groups is null"),
        (scheme("w4-groups") | {"config_groups": {"g": {"weights": {"num_bits": 3}}}}, "num_bits is 3"),
        (scheme("w4-groups") | {"config_groups": {"g": {"weights": None}}}, "num_bits is null"),
        (scheme("w4-groups") | {"config_groups": {"g": {"format": "x"}}}, 'g.format is "x"'),
        (scheme("mxfp4") | {"config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}}, 'type is "int"'),
        (scheme("mxfp4") | {"format": "nvfp4-pack-quantized"}, 'format is "nvfp4-pack-quantized"'),
        (
            scheme("w4-groups") | {"config_groups": {"g": {"weights": {"num_bits": 4, "actorder": "dynamic"}}}},
            'actorder is "dynamic"',
        ),
    ],
)
def test_a_scheme_that_is_not_understood_is_refused_by_name(entry: object, named: str) -> None:
    """Claim: a method, format, number of bits or order that is not read is refused by file, field and value.

    Source: packed weights read wrongly answer differently. Conclusive: each entry is changed alone; the first one of
    the layouts is read.
    """
    file = Path("config.json")
    assert read_scheme(file, {"quantization_config": scheme("w4-groups")}) is not None
    assert read_scheme(file, {}) is None
    with pytest.raises(ModelRefused) as caught:
        read_scheme(file, {"quantization_config": entry})
    assert named.replace("quantization_config is", "quant_method is null") in str(caught.value)


MODULE = "model.layers.0.mlp.up_proj"
FAULTS: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "no shape": ("w4-groups", lambda parts: parts.pop(f"{MODULE}.weight_shape"), "has no weight_shape"),
    "another shape": (
        "w4-groups",
        lambda parts: parts.update({f"{MODULE}.weight_shape": torch.tensor([160, 1 << 40])}),
        "weight_shape has the value [160, 1099511627776]",
    ),
    "a shape below 0": (
        "w4-groups",
        lambda parts: parts.update({f"{MODULE}.weight_shape": torch.tensor([160, -64])}),
        "weight_shape has the value",
    ),
    "bytes for words": (
        "w4-groups",
        lambda parts: parts.update({f"{MODULE}.weight_packed": torch.zeros(160, 8, dtype=torch.uint8)}),
        "weight_packed has the type",
    ),
    "an order of inputs": (
        "w4-groups",
        lambda parts: parts.update({f"{MODULE}.weight_g_idx": torch.zeros(64, dtype=torch.int32)}),
        "weight_g_idx belongs to no",
    ),
    "scales of no groups": (
        "w4-groups",
        lambda parts: parts.update({f"{MODULE}.weight_scale": torch.ones(160, 3)}),
        "weight_scale has the shape [160, 3]",
    ),
    "scales without a size": (
        "w4-groups",
        lambda parts: parts.update({f"{MODULE}.weight_scale": torch.ones(160, 0)}),
        "weight_scale has the shape [160, 0]",
    ),
    "scales of integers": (
        "int8-rows",
        lambda parts: parts.update({f"{MODULE}.weight_scale": torch.ones(160, 1, dtype=torch.int32)}),
        "weight_scale has the type",
    ),
    "zero points of other groups": (
        "w4-groups-zeros",
        lambda parts: parts.update({f"{MODULE}.weight_zero_point": torch.zeros(20, 5, dtype=torch.int32)}),
        "weight_zero_point has the shape [20, 5]",
    ),
    "scales of other blocks": (
        "fp8-blocks",
        lambda parts: parts.update({f"{MODULE}.weight_scale_inv": torch.ones(2, 2)}),
        "weight_scale_inv has the shape [2, 2]",
    ),
    "integers without a scale": (
        "int8-rows",
        lambda parts: parts.pop(f"{MODULE}.weight_scale"),
        f"{MODULE}.weight has the type",
    ),
    "two scales": (
        "fp8-blocks",
        lambda parts: parts.update({f"{MODULE}.weight_scale": torch.ones(1)}),
        "has two weights or scales",
    ),
    "FP8 that is no number": (
        "fp8-blocks",
        lambda parts: parts[f"{MODULE}.weight"].view(torch.uint8)[3].fill_(255),
        f'{MODULE}.weight has the value "nan"',
    ),
    "FP8 that is no number, unpacked": (
        "fp8-odd-blocks",
        lambda parts: parts[f"{MODULE}.weight"].view(torch.uint8)[3].fill_(127),
        f'{MODULE}.weight has the value "nan"',
    ),
    "a scale of FP8 that is no number": (
        "fp8-exponents",
        lambda parts: parts[f"{MODULE}.weight_scale_inv"].view(torch.uint8)[0].fill_(255),
        'weight_scale_inv has the value "nan"',
    ),
    "bytes of MXFP4 with other groups": (
        "mxfp4",
        lambda parts: parts.update({f"{MODULE}.weight_scale": torch.zeros(160, 4, dtype=torch.uint8)}),
        "weight_scale has the shape [160, 4]",
    ),
    "scales of MXFP4 as numbers": (
        "mxfp4",
        lambda parts: parts.update({f"{MODULE}.weight_scale": torch.ones(160, 2)}),
        'weight_scale has the type "F32"',
    ),
    "a scale of MXFP4 that is no number": (
        "mxfp4",
        lambda parts: parts[f"{MODULE}.weight_scale"].fill_(255),
        "weight_scale has the value 255",
    ),
    "a zero point of MXFP4": (
        "mxfp4",
        lambda parts: parts.update({f"{MODULE}.weight_zero_point": torch.zeros(160, 2, dtype=torch.uint8)}),
        "weight_zero_point belongs to no weight",
    ),
    "a scale of all weights of MXFP4": (
        "mxfp4",
        lambda parts: parts.update({f"{MODULE}.weight_global_scale": torch.ones(1)}),
        "weight_global_scale belongs to no",
    ),
    "a lost weight": ("w4-groups", lambda parts: parts.pop(f"{MODULE}.weight_packed"), f"lack {MODULE}.weight"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_tensors_that_do_not_fit_are_refused_by_name(name: str, plain: Path, tmp_path: Path) -> None:
    """Claim: a packed weight whose tensors do not fit each other is refused by tensor and value, before it is made.

    Source: the layouts' pages. Conclusive: each fault is planted alone into a folder that is read (the tests above);
    a shape of 2^40 inputs would take terabytes.
    """
    layout, plant, named = FAULTS[name]
    pack_folder(plain, tmp_path / "packed", layout)
    change_tensors(tmp_path / "packed", plant)
    with pytest.raises(ModelRefused) as caught:
        Driver.load(tmp_path / "packed", "float32")
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_the_scheme_is_part_of_the_digest(plain: Path, tmp_path: Path) -> None:
    """Claim: two folders of equal weights and other schemes have other digests. Conclusive: one entry is changed."""
    pack_folder(plain, tmp_path / "packed", "fp8-blocks")
    digest = open_model_folder(str(tmp_path / "packed")).digest()
    file = tmp_path / "packed" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["quantization_config"]["activation_scheme"] = "static"
    file.write_text(json.dumps(config), encoding="utf-8")
    assert open_model_folder(str(tmp_path / "packed")).digest() != digest
