"""Packed weights in the layouts of AWQ and GPTQ, in safetensors files.

Source: what AutoAWQ (`WQLinear_GEMM`) and AutoGPTQ or GPTQModel (`QuantLinear`) write. Both store a weight's transpose,
with a zero point and a scale for each group of inputs and each output: weight = scale * (value - zero point).

- AWQ: `qweight` [in, out / 8] and `qzeros` [groups, out / 8], 32-bit words along the outputs: the i-th four bits hold
  output WORD_ORDER[i] of eight.
- GPTQ: `qweight` [in * bits / 32, out], words along the inputs, and `qzeros` [groups, out * bits / 32] along the
  outputs, the first in the lowest bits; of the format `gptq` each zero point less one, of `gptq_v2` itself. `g_idx`
  [in] names the group of each input: only groups of neighbours are held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from specdec.engine.loading.integers import Integers, is_packable, unpacked_words
from specdec.engine.loading.stored import ENTRY, StoredTensor, check_plain, read_tensor, refuse_tensor
from specdec.engine.packed import GROUP_STEP, PackedWeight
from specdec.errors import ModelRefused
from specdec.folders import refuse

AWQ, GPTQ = "awq", "gptq"
AWQ_FORMAT, FORMAT_1, FORMAT_2 = "gemm", "gptq", "gptq_v2"
WORD_BITS = 32
WORD_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs in the order of an AWQ word's bits, from the lowest on
WEIGHT, ZEROS, SCALES, ORDER, BIAS = "qweight", "qzeros", "scales", "g_idx", "bias"
OWN_PARTS = (WEIGHT, ZEROS, SCALES, ORDER)  # of packed weights only
SCALE_TYPES = ("F16", "BF16", "F32")
BITS, GROUP = ("bits", "w_bit"), ("group_size", "q_group_size")
FORMAT_NAMES = {AWQ: ("version", "format"), GPTQ: ("checkpoint_format", "format")}
SWITCHES = ("desc_act", "sym", "zero_point", "lm_head", "true_sequential", "static_groups")
FIXED: Mapping[str, tuple[object, ...]] = {  # the values that other fields may have
    "method": (AWQ, GPTQ),
    "pack_dtype": ("int32",),
    "data_type": ("int",),
    "is_marlin_format": (False,),
    "do_fuse": (False,),
}
KERNELS = (  # of AWQ's `backend`: another one, llm-awq, is a layout of its own
    "autoawq auto auto_trainable machete marlin exllama_v2 exllama_v1 gemm gemm_triton gemv gemv_fast torch_awq "
    "torch_fused_awq"
).split()
UNREAD = frozenset(  # how the weights were found, and for which kernels: nothing that changes their meaning
    (
        "damp_percent damp_auto_increment act_group_aware mse hyb_act meta model_name_or_path model_file_base_name "
        "model_seqlen block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize batch_size "
        "pad_token_id tokenizer dataset max_input_length cache_block_outputs use_cuda_fp16 use_exllama disable_exllama "
        "exllama_config modules_to_fuse fuse_max_seq_len autoround_version iters seqlen nsamples amp lr minmax_lr "
        "enable_quanted_input enable_minmax_tuning low_gpu_mem_usage gradient_accumulate_steps"
    ).split()
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """What config.json says of the weights. `group`: inputs of a scale, 0: all of them; `has_order`: the inputs of a
    group need not be neighbours; `plain`: modules that are not packed."""

    method: str
    bits: int
    group: int
    format: str
    has_order: bool = False
    plain: tuple[str, ...] = ()

    def weights(self, stored: Mapping[str, StoredTensor]) -> AwqGptqWeights:
        return AwqGptqWeights(self, stored)


def read_awq(file: Path, entry: Mapping[str, Any]) -> Scheme:
    """Returns the scheme of a configuration of AWQ. Raises ModelRefused for a field that is not understood."""
    fields = _Fields(file, AWQ, entry)
    fields.check("backend", KERNELS)
    fields.check("desc_act", (False,))
    plain = fields.value("modules_to_not_convert") or []
    if not isinstance(plain, list) or not all(isinstance(name, str) for name in plain):
        fields.refuse("modules_to_not_convert", "a list of strings")
    return Scheme(AWQ, fields.bits((4,)), fields.group(), fields.format((AWQ_FORMAT,)), plain=tuple(plain))


def read_gptq(file: Path, entry: Mapping[str, Any]) -> Scheme:
    """Returns the scheme of a configuration of GPTQ. Raises ModelRefused for a field that is not understood."""
    fields = _Fields(file, GPTQ, entry)
    rules = fields.value("dynamic") or {}
    if not isinstance(rules, dict) or not all(rule.startswith("-:") for rule in rules):
        fields.refuse("dynamic", "absent, or rules that begin with -: and leave modules as they are")
    found = fields.format((FORMAT_1, FORMAT_2))
    return Scheme(GPTQ, fields.bits((4, 8)), fields.group(), found, fields.value("desc_act") is True)


class _Fields:
    """The fields of a configuration, of which each has a meaning that is known here; those of null have none."""

    def __init__(self, file: Path, method: str, entry: Mapping[str, Any]):
        self._file, self._method = file, method
        self._entry = {name: value for name, value in entry.items() if value is not None}
        own = ("modules_to_not_convert",) if method == AWQ else ("dynamic",)
        known = {"quant_method", "backend", *FORMAT_NAMES[method], *BITS, *GROUP, *SWITCHES, *FIXED, *own, *UNREAD}
        unknown = sorted(self._entry.keys() - known)
        if unknown:
            self.refuse(unknown[0], "absent: it is not supported")
        for name in SWITCHES:
            self.check(name, (True, False))
        for name, values in FIXED.items():
            self.check(name, values)

    def value(self, name: str) -> Any:
        return self._entry.get(name)

    def check(self, name: str, values: tuple[object, ...] | list[str]) -> None:
        """Refuses a field that is there and has another value, or one of another type."""
        found = self._entry.get(name)
        if name in self._entry and not any(found == value and type(found) is type(value) for value in values):
            self.refuse(name, f"{' or '.join(str(value).lower() for value in values)}, or absent")

    def bits(self, choices: tuple[int, ...]) -> int:
        found = self._integer(BITS)
        if found not in choices:
            self.refuse(BITS[0], f"{' or '.join(map(str, choices))} of {self._method}")
        return found

    def group(self) -> int:
        """Returns the inputs of a scale; 0: all of them."""
        found = self._integer(GROUP)
        if found != -1 and (found < 1 or found % GROUP_STEP):
            self.refuse(GROUP[0], f"-1, for all inputs, or a multiple of {GROUP_STEP} from {GROUP_STEP} on")
        return max(found, 0)

    def format(self, choices: tuple[str, ...]) -> str:
        """Returns the layout; the first of the choices if no field names one."""
        found = self._same(FORMAT_NAMES[self._method], choices[0])
        layout = found.lower() if isinstance(found, str) else found
        if layout not in choices:
            self.refuse(FORMAT_NAMES[self._method][0], " or ".join(choices))
        return str(layout)

    def _integer(self, names: tuple[str, ...]) -> int:
        found = self._same(names, None)
        if type(found) is not int:
            self.refuse(names[0], "an integer")
        return found

    def _same(self, names: tuple[str, ...], absent: object) -> Any:
        """Returns the value of a field that has two names; both must agree."""
        found = [self._entry[name] for name in names if name in self._entry]
        if found and found[0] != found[-1]:
            self.refuse(names[1], f"the value of {names[0]}")
        return found[0] if found else absent

    def refuse(self, name: str, limit: str) -> NoReturn:
        """Raises ModelRefused for a field."""
        names = next((pair for pair in (BITS, GROUP, FORMAT_NAMES[self._method]) if name == pair[0]), (name,))
        named = next((each for each in names if each in self._entry), name)
        raise refuse(self._file, f"{ENTRY}.{named}", self._entry.get(named), limit)


class AwqGptqWeights:
    """The weights of a folder with a scheme: a `PackedFolder`. `stored`: the tensors of its files."""

    def __init__(self, scheme: Scheme, stored: Mapping[str, StoredTensor]):
        self._scheme, self._stored = scheme, stored
        self._modules: dict[str, str] = {}  # of a weight's name
        self.tensors: dict[str, StoredTensor] = {}
        packed = {name.rpartition(".")[0] for name in stored if name.rpartition(".")[2] in OWN_PARTS}
        for name, tensor in stored.items():
            module, _, part = name.rpartition(".")
            if module not in packed or part == BIAS:
                check_plain(stored, name)
                self.tensors[name] = tensor
            elif part == WEIGHT:
                self._modules[f"{module}.weight"] = module
                shape = self._checked_shape(module)
                self.tensors[f"{module}.weight"] = StoredTensor(tensor.file, f"I{scheme.bits}", shape)
            elif part not in OWN_PARTS or f"{module}.{WEIGHT}" not in stored:
                raise ModelRefused(f"{tensor.file}: {name} belongs to no weight of {scheme.method}")

    @property
    def format(self) -> str:
        return f"{self._scheme.method} I{self._scheme.bits}"

    def dense(self, name: str) -> torch.Tensor:
        module = self._modules.get(name)
        return read_tensor(self._stored, name) if module is None else self._integers(module).dense()

    def is_packed(self, name: str) -> bool:
        module = self._modules.get(name)
        if module is None:
            return False
        scales = self._stored[f"{module}.{SCALES}"]
        return is_packable(self.tensors[name].shape[1] // scales.shape[0], scales, has_zeros=True)

    def packed(self, name: str) -> PackedWeight:
        return self._integers(self._modules[name]).packed()

    def _checked_shape(self, module: str) -> tuple[int, int]:
        """Returns a weight's shape [out, in] after checking its tensors against each other."""
        scheme, name = self._scheme, f"{module}.{WEIGHT}"
        own = self._stored[name]
        if any(f".{plain}." in f".{module}." for plain in scheme.plain):
            raise ModelRefused(f"{own.file}: {name} is packed, but modules_to_not_convert names it")
        for part in (ZEROS, SCALES):
            if f"{module}.{part}" not in self._stored:
                raise ModelRefused(f"{own.file}: {name} has no {part} beside it")
        if len(own.shape) != 2 or 0 in own.shape:
            self._refuse(name, "shape", list(own.shape), "two sizes from 1 on")
        per_word = WORD_BITS // scheme.bits
        in_size, out_size = own.shape[0], own.shape[1]
        if scheme.method == AWQ:
            out_size *= per_word
        else:
            in_size *= per_word
        group = scheme.group or in_size
        if in_size % group or group % GROUP_STEP or out_size % per_word:
            limit = f"whole groups of {group} inputs, each a multiple of {GROUP_STEP}, and of {per_word} outputs"
            self._refuse(name, "shape", list(own.shape), limit)
        groups = in_size // group
        self._check(name, ("I32",), own.shape)
        self._check(f"{module}.{ZEROS}", ("I32",), (groups, out_size // per_word))
        self._check(f"{module}.{SCALES}", SCALE_TYPES, (groups, out_size))
        if scheme.method == GPTQ:
            self._check_values(module, in_size, group)
        elif f"{module}.{ORDER}" in self._stored:
            raise ModelRefused(f"{own.file}: {module}.{ORDER} belongs to no weight of {AWQ}")
        return out_size, in_size

    def _check(self, name: str, types: tuple[str, ...], shape: tuple[int, ...]) -> None:
        tensor = self._stored[name]
        if tensor.dtype not in types:
            self._refuse(name, "type", tensor.dtype, " or ".join(types))
        if tensor.shape != shape:
            self._refuse(name, "shape", list(tensor.shape), f"{list(shape)}, by {WEIGHT} and {ENTRY}")

    def _check_values(self, module: str, in_size: int, group: int) -> None:
        """Checks the order of a GPTQ weight's inputs, and that each zero point has one meaning: of the format `gptq`
        the largest number stands for 2^bits in some programs, for 0 in others, or spills into the next one."""
        name = f"{module}.{ORDER}"
        if name in self._stored:
            self._check(name, ("I32",), (in_size,))
            order = read_tensor(self._stored, name)
            expected = torch.arange(in_size, dtype=torch.int32) // group
            if not torch.equal(order, expected):
                first = int((order != expected).nonzero()[0])
                limit = f"{int(expected[first])}: an order of the inputs is not supported"
                self._refuse(name, f"group of input {first}", int(order[first]), limit)
        elif self._scheme.has_order:
            raise ModelRefused(f"{self._stored[f'{module}.{WEIGHT}'].file}: desc_act is true, but {name} is missing")
        if self._scheme.format == FORMAT_1:
            largest = (1 << self._scheme.bits) - 1
            zeros = self._stored_zeros(module)
            if int(zeros.max()) + (1 << (self._scheme.bits - 1)) == largest:
                limit = f"below {largest} of {FORMAT_1}, whose readers differ in its meaning; {FORMAT_2} has none"
                self._refuse(f"{module}.{ZEROS}", "value", largest, limit)

    def _integers(self, module: str) -> Integers:
        scheme = self._scheme
        scales = read_tensor(self._stored, f"{module}.{SCALES}")
        words = read_tensor(self._stored, f"{module}.{WEIGHT}")
        zeros = self._stored_zeros(module)
        if scheme.method == AWQ:
            values = _in_order(unpacked_words(words, scheme.bits, scales.shape[1])).T.contiguous()
            zeros = _in_order(zeros)
        else:
            values = unpacked_words(words.T.contiguous(), scheme.bits, len(words) * (WORD_BITS // scheme.bits))
        points = zeros.T.to(torch.float32)
        if scheme.format == FORMAT_1:
            points = points + 1
        return Integers(scheme.bits, values, scales.T.contiguous(), points.contiguous())

    def _stored_zeros(self, module: str) -> torch.Tensor:
        words = read_tensor(self._stored, f"{module}.{ZEROS}")
        return unpacked_words(words, self._scheme.bits, words.shape[1] * (WORD_BITS // self._scheme.bits))

    def _refuse(self, name: str, what: str, value: object, limit: str) -> NoReturn:
        refuse_tensor(self._stored, name, what, value, limit)


def _in_order(values: torch.Tensor) -> torch.Tensor:
    """Returns the values of AWQ's words in the order of the outputs.  # [rows, out]"""
    places = [WORD_ORDER.index(output) for output in range(len(WORD_ORDER))]
    return values.view(len(values), -1, len(places))[:, :, places].reshape(values.shape)
