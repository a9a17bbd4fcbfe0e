"""Folders in the layouts of AWQ and GPTQ: each layout means what it says, and what is not understood is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec.engine.loading.model_folder import open_model_folder
from specdec.engine.loading.schemes import read_scheme
from specdec.errors import ModelRefused
from tests.support.awq_gptq_folders import LAYOUTS, changed, pack_folder, words
from tests.support.engine_models import make_tiny_model
from tests.support.packed_folders import Tensors, change_tensors, check_served

MODULE, OTHER_MODULE = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"  # [160, 64], [64, 160]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of dense weights, by the kind of model; that of `qwen2` has biases."""
    kinds = sorted({layout.kind for layout in LAYOUTS.values()})
    sizes = {"num_hidden_layers": 2, "intermediate_size": 160}
    return {kind: make_tiny_model(tmp_path_factory.mktemp(kind), kind, **sizes) for kind in kinds}


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_and_logits_are_those_that_a_layout_means(name: str, plain: dict[str, Path], tmp_path: Path) -> None:
    """Claim: each weight is scale times (integer - zero point), once rounded, also as a `PackedWeight`, which there is
    for scales of 16 bits; logits are those of `transformers` with these weights.

    Source: the layouts as AutoAWQ and GPTQModel write them. Conclusive: the test packs number by number, in float64,
    with another scale and zero point for each group and output, and no two sizes of a module are equal in the MLP.
    """
    layout = LAYOUTS[name]
    meant = pack_folder(plain[layout.kind], tmp_path / "packed", layout)
    folder = open_model_folder(str(tmp_path / "packed"))
    assert folder.packed
    assert folder.tensors.keys() == meant.keys()
    for each, weight in meant.items():
        assert torch.equal(folder.packed.dense(each), weight.to(torch.float32)), each
        is_packed = folder.packed.is_packed(each)
        assert is_packed == (each.endswith("_proj.weight") and layout.dtype is not torch.float32), each
        if is_packed:
            packed = folder.packed.packed(each)
            assert packed.bits == layout.bits
            assert torch.equal(packed.dense(), weight.to(torch.float32)), each
    assert folder.packed.format == f"{layout.method} I{layout.bits}"
    check_served(plain[layout.kind], tmp_path / "packed", meant, folder.packed.format)


def test_words_are_those_of_the_layouts() -> None:
    """Claim: the test's own words are those of AutoAWQ and GPTQ. Conclusive: words written out by hand: AWQ has the
    outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on."""
    assert words([[0, 1, 2, 3, 4, 5, 6, 7]], 4, is_awq=True).tolist() == [[0x75316420]]
    assert words([[1, 2, 3, 4, 5, 6, 7, 15]], 4, is_awq=False).tolist() == [[0xF7654321 - (1 << 32)]]
    assert words([[1, 2, 3, 4]], 8, is_awq=False).tolist() == [[0x04030201]]


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (changed("awq-groups", version="gemv"), 'version is "gemv"'),
        (changed("awq-groups", version=5), "version is 5"),
        (changed("awq-groups", backend="llm-awq"), 'backend is "llm-awq"'),
        (changed("awq-groups", bits=8), "bits is 8"),
        (changed("awq-groups", w_bit=8), "w_bit is 8; it must be the value of bits"),
        (changed("awq-groups", zero_point="yes"), 'zero_point is "yes"'),
        (changed("awq-groups", desc_act=True), "desc_act is true"),
        (changed("awq-groups", modules_to_not_convert="lm_head"), 'modules_to_not_convert is "lm_head"'),
        (changed("awq-groups", modules_to_not_convert=[1]), "modules_to_not_convert is [1]"),
        (changed("awq-groups", kv_cache_scheme={}), "kv_cache_scheme is {}"),
        (changed("gptq4-groups", bits=3), "bits is 3"),
        (changed("gptq4-groups", bits=True), "bits is true"),
        (changed("gptq4-groups", bits="4"), 'bits is "4"'),
        (changed("gptq4-groups", bits=None), "bits is null"),
        (changed("gptq4-groups", group_size=0), "group_size is 0"),
        (changed("gptq4-groups", group_size=-2), "group_size is -2"),
        (changed("gptq4-groups", group_size=12), "group_size is 12"),
        (changed("gptq4-groups", group_size=32.5), "group_size is 32.5"),
        (changed("gptq4-groups", checkpoint_format="marlin"), 'checkpoint_format is "marlin"'),
        (changed("gptq4-groups", format="gptq_v2"), 'format is "gptq_v2"; it must be the value of checkpoint_format'),
        (changed("gptq4-groups", is_marlin_format=True), "is_marlin_format is true"),
        (changed("gptq4-groups", pack_dtype="int16"), 'pack_dtype is "int16"'),
        (changed("gptq4-groups", desc_act=1), "desc_act is 1"),
        (changed("gptq4-groups", dynamic={"+:.*": {"bits": 8}}), "dynamic is {"),
        (changed("gptq4-groups", dynamic=["-:.*"]), "dynamic is ["),
        (changed("gptq4-groups", rotation="hadamard"), 'rotation is "hadamard"'),
    ],
)
def test_a_field_that_is_not_understood_is_refused_by_name(entry: dict[str, object], named: str) -> None:
    """Claim: a layout, a number, a switch or a field that is not known is refused by file, field and value.

    Source: packed weights read wrongly answer differently. Conclusive: each entry is changed alone, and the unchanged
    ones are read, as are fields that change no weight.
    """
    file = Path("config.json")
    for layout in LAYOUTS:
        assert read_scheme(file, {"quantization_config": changed(layout, dataset="c4", pack_dtype="int32")}) is not None
    assert read_scheme(file, {"quantization_config": changed("gptq4-groups", dynamic={"-:.*head": {}})}) is not None
    with pytest.raises(ModelRefused) as caught:
        read_scheme(file, {"quantization_config": entry})
    assert str(caught.value).startswith(f"config.json: quantization_config.{named}")


def put(part: str, value: torch.Tensor) -> Callable[[Tensors], object]:
    """A change of one tensor of MODULE."""
    return lambda parts: parts.update({f"{MODULE}.{part}": value})


ORDER = torch.arange(64, dtype=torch.int32) // 32
FAULTS: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "an order of inputs": (
        "gptq4-groups",
        put("g_idx", ORDER.flip(0)),
        "g_idx has the group of input 0 1; it must be 0",
    ),
    "groups below 0": ("gptq4-groups", put("g_idx", -ORDER), "g_idx has the group of input 32 -1"),
    "an order of other inputs": ("gptq4-groups", put("g_idx", ORDER[:40]), "g_idx has the shape [40]"),
    "an order of other numbers": ("gptq4-groups", put("g_idx", ORDER.float()), 'g_idx has the type "F32"'),
    "no order": ("gptq4-groups", lambda parts: parts.pop(f"{MODULE}.g_idx"), "g_idx is missing"),
    "an order of AWQ": ("awq-groups", put("g_idx", ORDER), "g_idx belongs to no weight of awq"),
    "a zero point of two meanings": (
        "gptq4-groups",
        put("qzeros", torch.full((2, 20), -1, dtype=torch.int32)),
        "qzeros has the value 15; it must be below 15",
    ),
    "zero points of other groups": (
        "awq-groups",
        put("qzeros", torch.zeros(4, 20, dtype=torch.int32)),
        "qzeros has the shape [4, 20]; it must be [2, 20]",
    ),
    "zero points as numbers": ("awq-groups", put("qzeros", torch.zeros(2, 20)), 'qzeros has the type "F32"'),
    "scales of other outputs": (
        "gptq8-groups",
        put("scales", torch.ones(4, 80)),
        "scales has the shape [4, 80]; it must be [4, 160]",
    ),
    "scales of integers": (
        "awq-groups",
        put("scales", torch.ones(2, 160, dtype=torch.int32)),
        'scales has the type "I32"',
    ),
    "words of 64 bits": (
        "awq-groups",
        put("qweight", torch.zeros(64, 20, dtype=torch.int64)),
        'qweight has the type "I64"',
    ),
    "words of no size": ("awq-groups", put("qweight", torch.zeros(0, 20, dtype=torch.int32)), "qweight has the shape"),
    "words of three sizes": (
        "awq-groups",
        put("qweight", torch.zeros(64, 20, 1, dtype=torch.int32)),
        "qweight has the shape [64, 20, 1]",
    ),
    "inputs of no whole groups": (
        "gptq4-groups",
        put("qweight", torch.zeros(5, 160, dtype=torch.int32)),
        "qweight has the shape [5, 160]; it must be whole groups of 32",
    ),
    "outputs of no whole words": (
        "gptq4-groups",
        put("qweight", torch.zeros(8, 159, dtype=torch.int32)),
        "qweight has the shape [8, 159]",
    ),
    "another model's sizes": (
        "gptq4-groups",
        lambda parts: parts.update(
            {f"{MODULE}.{part}": parts[f"{OTHER_MODULE}.{part}"].clone() for part in ("qweight", "scales")}
        ),
        "qzeros has the shape [2, 20]; it must be [5, 8]",
    ),
    "no scales": ("awq-groups", lambda parts: parts.pop(f"{MODULE}.scales"), "qweight has no scales beside it"),
    "no zero points": ("gptq4-groups", lambda parts: parts.pop(f"{MODULE}.qzeros"), "qweight has no qzeros"),
    "scales of activations": (
        "awq-groups",
        lambda parts: parts.update({"model.layers.0.mlp.act.scales": torch.ones(160)}),
        "mlp.act.scales belongs to no weight of awq",
    ),
    "two weights": ("awq-groups", put("weight", torch.zeros(160, 64)), "up_proj.weight belongs to no weight of awq"),
    "another tensor": ("awq-groups", put("perm", torch.zeros(64)), "up_proj.perm belongs to no weight of awq"),
    "integers without a scale": (
        "awq-groups",
        lambda parts: parts.update({"lm_head.weight": torch.zeros(301, 64, dtype=torch.int8)}),
        'lm_head.weight has the type "I8"',
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_tensors_that_do_not_fit_are_refused_by_name(name: str, plain: dict[str, Path], tmp_path: Path) -> None:
    """Claim: a packed weight whose tensors do not fit each other, or whose inputs have an order, is refused by tensor
    and value when its folder is opened.

    Source: the layouts as AutoAWQ and GPTQModel write them. Conclusive: each fault is planted alone into a folder that
    is read (the tests above), and no weight was asked for.
    """
    layout, plant, named = FAULTS[name]
    pack_folder(plain["llama"], tmp_path / "packed", LAYOUTS[layout])
    change_tensors(tmp_path / "packed", plant)
    with pytest.raises(ModelRefused) as caught:
        open_model_folder(str(tmp_path / "packed"))
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_a_packed_module_that_is_named_as_plain_is_refused(plain: dict[str, Path], tmp_path: Path) -> None:
    """Claim: a folder that packs what `modules_to_not_convert` names is refused: one of both is wrong. Conclusive: the
    folder is read with the head alone in that list (the tests above)."""
    pack_folder(plain["llama"], tmp_path / "packed", LAYOUTS["awq-groups"])
    file = tmp_path / "packed" / "config.json"
    file.write_text(file.read_text(encoding="utf-8").replace('["lm_head"]', '["mlp"]'), encoding="utf-8")
    with pytest.raises(ModelRefused, match="down_proj.qweight is packed, but modules_to_not_convert names it"):
        open_model_folder(str(tmp_path / "packed"))
