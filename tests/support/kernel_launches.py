"""The kernels of a step of a model, as they are launched: compiled without a GPU, and what the result tells of itself.

Triton brings the programs of NVIDIA's toolkit with which it compiles (`ptxas`) and with which a binary is read
(`cuobjdump`), in `triton/backends/nvidia/bin`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from specdec.engine.cuda.items import ItemLayout
from specdec.engine.cuda.kernels import attention, edits, logprobs, norms, products, qkv, sampling
from specdec.engine.cuda.kernels.configs import head_tiles, sum_parts

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}
TYPES |= {torch.int64: "*i64", torch.float64: "*fp64"}
MODULES: tuple[Any, ...] = (products, qkv, norms, attention)
SAMPLER: tuple[Any, ...] = (sampling, edits, logprobs)  # whose functions launch by `sampling.run`
TRITON_STAGES = 3  # where a launch names none
# The types of NVIDIA's instructions for tensor cores: of a warp, of four warps, of the generation after.
TENSOR_CORES = re.compile(r"\b(HMMA|HGMMA|UTCHMMA|UTCQMMA|QGMMA|OMMA)\b")
# Bytes of shared memory that one block may have: NVIDIA's programming guide, table of compute capabilities.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True)
class Model:
    """The sizes of a model, and what sets its kernels apart."""

    hidden: int
    heads: int
    kv_heads: int
    size: int
    inner: int
    vocab: int
    dtype: torch.dtype = torch.bfloat16
    gain: torch.dtype = torch.bfloat16
    activation: products.Activation = "silu"
    bias: bool = False
    softcap: float | None = None
    rotated: int | None = None


MODELS = {
    "llama-1b": Model(2048, 32, 8, 64, 8192, 128256),
    "llama-8b": Model(4096, 32, 8, 128, 14336, 128256),
    "qwen-0.5b": Model(896, 14, 2, 64, 4864, 151936, torch.float16, torch.float16, bias=True),
    "gemma-2b": Model(2304, 8, 4, 256, 9216, 256000, gain=torch.float32, activation="gelu_tanh", softcap=30.0),
    "phi-4-mini": Model(3072, 24, 8, 128, 8192, 200064, rotated=96),
}


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, the types of its arguments, the values of its constants, and which arguments are pointers
    to, or are, multiples of 16. `is_fused`: multiplications and additions become one instruction."""

    kernel: Any
    types: dict[str, str]
    constants: dict[tuple[int], Any]
    aligned: tuple[int, ...]
    warps: int
    stages: int
    is_fused: bool = True
    pdl: bool = False

    @property
    def options(self) -> dict[str, Any]:
        own = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": self.is_fused}
        return own | {"launch_pdl": self.pdl}

    def source(self) -> Any:
        """What Triton compiles, as it would for a launch on a GPU."""
        from triton.compiler import ASTSource

        attributes = {(place,): [["tt.divisibility", 16]] for place in self.aligned}
        return ASTSource(self.kernel, signature=self.types, constexprs=self.constants, attrs=attributes)


def launch_of(
    kernel: Any, arguments: Sequence[Any], constants: dict[str, Any], warps: int, stages: int, is_fused: bool = True
) -> Launch:
    """A launch with these arguments; numbers that Triton specializes are compiled as it would."""
    values = [*arguments, *(constants[name] for name in kernel.arg_names[len(arguments) :])]
    types, constant_values, aligned = {}, {}, []
    for place, (name, value) in enumerate(zip(kernel.arg_names, values)):
        is_special = place < len(arguments) and isinstance(value, int) and not kernel.params[place].do_not_specialize
        if isinstance(value, torch.Tensor):
            types[name] = TYPES[value.dtype]
            aligned.append(place)
        elif place < len(arguments) and value is not None and not (is_special and value == 1):
            types[name] = "i32"
            if is_special and value % 16 == 0:
                aligned.append(place)
        else:
            types[name] = "constexpr"
            constant_values[(place,)] = value
    return Launch(kernel, types, constant_values, tuple(aligned), warps, stages, is_fused)


@contextmanager
def recorded(pdl: bool = False) -> Iterator[list[Launch]]:
    """Within it, launches are recorded instead of made, dependent ones with `pdl`; tensors may be on the device
    "meta"."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: object, *arguments: Any, warps: int, stages: int, **constants: Any) -> None:
        constants |= {"STAGES": stages, "WIDE": False, "PDL": pdl}
        launches.append(replace(launch_of(kernel, arguments, constants, warps, stages), pdl=pdl))

    def record_run(kernel: Any, grid: object, *arguments: Any, warps: int = sampling.WARPS, **constants: Any) -> None:
        launches.append(launch_of(kernel, arguments, constants, warps, TRITON_STAGES, is_fused=False))

    with ExitStack() as patches:
        for module in MODULES:
            patches.enter_context(mock.patch.object(module, "launch", record))
        for module in SAMPLER:
            patches.enter_context(mock.patch.object(module, "run", record_run))
        yield launches


NAMES = ("embed", "qkv_rope", "rope_write", "attend", "combine", "o", "gate_up", "down", "rms_norm", "head", "pick")


def step_of(model: Model, pdl: bool = False) -> dict[str, Launch]:
    """The launches of a step of a model, each once, by name; dependent ones with `pdl`."""
    with recorded(pdl) as launches:
        launch_step(model, torch.device("meta"))
    return dict(zip(NAMES, launches, strict=True))


def launch_step(model: Model, device: torch.device, slots: int = 1 << 20) -> None:
    """Launches the kernels of a step of a model once, in the order of NAMES, on 16 rows of zeros."""
    rows = 16
    kinds = {"x": model.dtype, "gain": model.gain, "f": torch.float32, "i": torch.int32, "l": torch.int64}

    def of(kind: str, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=kinds[kind], device=device)

    hidden, inner, size = model.hidden, model.inner, model.size
    heads, kv_heads, tiles = model.heads, model.kv_heads, head_tiles(model.vocab)
    x, sums, gain = of("x", rows, hidden), of("f", rows, sum_parts(hidden)), of("gain", hidden)
    norm = products.RowNorm(sums, gain, 1e-6)
    turned = size if model.rotated is None else model.rotated
    angles, places = [of("x", 4096, turned // 2)] * 2, [of("l", rows)] * 2
    written = of("x", rows, heads, size), *[of("x", slots, kv_heads, size)] * 2
    outputs = (heads + 2 * kv_heads) * size
    flags = of("i", rows)
    found = of("f", rows, tiles), of("i", rows, tiles), of("i", rows, tiles)
    bias = of("x", outputs) if model.bias else None
    tile_rows = attention.attend_config(heads, kv_heads, size).tile_rows
    items = of("i", 4096), ItemLayout(rows, 256, tile_rows, (None,), 0)
    partials = attention.make_partials(rows, heads, size, 131072, device)
    rule = {"scaling": size**-0.5, "softcap": model.softcap}
    norms.embed(places[0], of("x", model.vocab, hidden), x, sums, rows)
    qkv.qkv_rope(x, of("x", outputs, hidden), *angles, *places, *written, rows, norm=norm, bias=bias)
    head_rows = of("x", rows, heads + 2 * kv_heads, size)
    gains = of("gain", size), of("gain", size)
    qkv.rope_write(head_rows, *angles, *places, *written, rows, gains=gains, epsilon=1e-6)
    attention.attend(*written, *items, partials, 128, **rule)
    attention.combine(partials, *items, written[0])
    attended = of("x", rows, heads * size)
    products.product(attended, of("x", hidden, heads * size), x, rows, residual=x, sums=sums)
    activated = of("x", rows, inner)
    products.product(x, of("x", 2 * inner, hidden), activated, rows, norm=norm, activation=model.activation)
    products.product(activated, of("x", hidden, inner), x, rows, residual=x, sums=sums)
    norms.rms_norm(x, gain, x, rows, 1e-6, residual=x, sums=sums, finite=flags)
    products.head(x, of("x", model.vocab, hidden), of("f", rows, model.vocab), *found, rows, softcap=model.softcap)
    products.pick(*found, flags, flags, rows)


def sampler_of(width: int, dtype: torch.dtype) -> dict[str, Launch]:
    """The launches of the sampler for rows of `width` logits with every rule and edit, each once, by name. `dtype`:
    float64 behind edits, else float32."""
    rows, selected, columns = 8, 4, 1025

    def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    numbers, words, whole = torch.float64, torch.int32, torch.int64
    values, logits = of(dtype, rows, width), of(torch.float32, rows, width)
    tables = sampling.Tables(
        of(whole, rows, sampling.FIELDS),
        of(numbers, rows, sampling.NUMBERS),
        of(whole, selected),
        of(whole, 4096),
        of(numbers, 4096),
        test_count=7,
        touched_max=64,
        has_totals=True,
    )
    its = of(whole, rows, edits.FIELDS), of(numbers, rows, edits.PENALTIES), of(whole, 4096), of(numbers, 4096)
    with recorded() as launches:
        sampling.sample(values, tables, of(dtype, selected, columns))
        edits.edit(logits, edits.Edits(*its, of(words, rows, -(-width // 32))))
        logprobs.row_logprobs(logits, of(whole, rows), of(whole, rows, 5), of(numbers, rows), 20)
    return {launch.kernel.__name__: launch for launch in launches}


@dataclass(frozen=True)
class Binary:
    """What a compiled kernel's disassembly tells: bytes of spilled registers and of shared memory, and the kinds of
    instructions for tensor cores that are in it. `ptx` is what it was assembled from."""

    spilled_bytes: int
    shared_bytes: int
    tensor_cores: frozenset[str]
    ptx: str


def compiled(launch: Launch, capability: int) -> Binary:
    """Compiles for a GPU of this compute capability, times 10, and reads the binary."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = triton.compile(launch.source(), target=GPUTarget("cuda", capability, 32), options=launch.options)
    path = Path(triton.knobs.cache.dir) / f"{kernel.hash}.cubin"
    path.write_bytes(kernel.asm["cubin"])
    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

    def read(option: str) -> str:
        return subprocess.run([reader, option, path], capture_output=True, text=True, check=True).stdout

    usage = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", read("--dump-resource-usage"))
    assert usage, "cuobjdump does not tell what a kernel uses"
    disassembly = read("--dump-sass")
    assert "EXIT" in disassembly
    spilled = int(usage[1]) + int(usage[2]) + len(re.findall(r"\b(?:LDL|STL)\b", disassembly))
    return Binary(spilled, kernel.metadata.shared, frozenset(TENSOR_CORES.findall(disassembly)), kernel.asm["ptx"])


def intermediate(launch: Launch) -> str:
    """The kernel in Triton's own intermediate language, before any optimization."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options(launch.options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    return str(launch.source().make_ir(target, options, functions, backend.get_module_map(), context))
