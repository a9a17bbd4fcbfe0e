"""compressed-tensors: a tiny Llama in each format that specdec reads, written by the package itself, and the weights as
it decompresses them again. Reads {"folder": …} from stdin; prints its version and the names of what it wrote."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

BLOCK = 128
KINDS = {  # by name: the format, and how weights are stored
    "w4-groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "w4-groups-zeros": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False}),
    "w4-rows": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "w8-groups": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 64}),
    "int8-rows": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8-rows-zeros": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "int8-tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "fp8-tensor": ("float-quantized", {"type": "float", "strategy": "tensor"}),
    "fp8-rows": ("float-quantized", {"type": "float", "strategy": "channel"}),
    "fp8-blocks": ("float-quantized", {"type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK]}),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
        | {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8},
    ),
}


def extremes(weight: torch.Tensor, strategy: str, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest weight of each scale, in the shape of the scales."""
    rows, width = weight.shape
    parts = {"tensor": (1, rows, 1, width), "channel": (rows, 1, 1, width), "block": (rows // BLOCK, BLOCK, -1, BLOCK)}
    by_scale = weight.reshape(parts.get(strategy, (rows, 1, -1, group or width)))
    least, largest = by_scale.amin((1, 3)), by_scale.amax((1, 3))
    return (least.reshape(1), largest.reshape(1)) if strategy == "tensor" else (least, largest)


def write(folder: Path, name: str) -> None:
    """Writes the folder of a kind, and beside it its weights decompressed."""
    form, arguments = KINDS[name]
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 256, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes, **heads)).to(torch.bfloat16)
    weights = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=form)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=form)
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        found = calculate_qparams(*extremes(module.weight.data, arguments["strategy"], weights.group_size), weights)
        for own, values in zip((module.weight_scale, getattr(module, "weight_zero_point", None)), found):
            if own is not None:
                own.data = values.reshape(own.shape).to(own.dtype)
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=form)
    compressor.compress_model(model)
    model.save_pretrained(folder / name)
    compressor.update_config(str(folder / name))
    compressor.decompress_model(model)
    dense = {key: value.contiguous() for key, value in model.state_dict().items() if key.endswith("proj.weight")}
    save_file(dense, folder / f"{name}.safetensors")


place = Path(json.load(sys.stdin)["folder"])
failed = {}
for kind in KINDS:
    try:
        write(place, kind)
    except Exception as error:  # noqa: BLE001 (the others are still worth reading)
        failed[kind] = f"{type(error).__name__}: {error}"
answers = {kind: failed.get(kind, "") for kind in KINDS}
print(json.dumps({"version": version("compressed-tensors"), "answers": answers}))
