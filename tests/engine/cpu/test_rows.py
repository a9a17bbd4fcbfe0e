"""Norms, activations, elementary functions and the argmax of the native kernels: near float64 and the modules of
`transformers`, the same bits in any company, and the check of a step's rows.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec.engine.cpu.compile_kernels import FLAGS, UNITS, NotCompiled, find_compiler
from specdec.engine.cpu.kernels import ACTIVATIONS, LIBRARY, SOURCES, Kernels, Norm, kernels
from specdec.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
U = ROUNDOFF[torch.float32]
SPECIAL = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-38, -1e-38, 1e-42, 90.0, -104.5, 3e38])

pytestmark = pytest.mark.skipif(kernels() is None, reason="native kernels are off")


def every_size(count: int = 200_000) -> Tensor:
    """Numbers of either sign whose bits are spread evenly over all of float32: every exponent, and not-a-number."""
    bits = numpy.linspace(0, 2**32 - 1, count).astype(numpy.uint32)
    return torch.cat([SPECIAL, torch.from_numpy(bits.view(numpy.float32)), torch.linspace(-12, 12, count)])


def assert_ulps(found: Tensor, exact: Tensor, most: float) -> None:
    """Errors in units in the last place of float32, those of the smallest normal number below it."""
    expected = exact.float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    usual = expected.isfinite()
    ulp = torch.exp2(torch.floor(torch.log2(exact[usual].abs().clamp(min=2.0**-126))) - 23)
    worst = float(((found.double() - exact)[usual].abs() / ulp).max())
    assert worst <= most, worst
    assert torch.equal(found[expected.isinf()], expected[expected.isinf()])


@pytest.fixture(scope="module")
def elementary(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Tensor], Tensor]:
    """exp, tanh and erf as the kernels have them, compiled from elementary.h."""
    folder = tmp_path_factory.mktemp("elementary")
    lines = ['#include "elementary.h"']
    loop = "for (int64_t i = 0; i < n; i++)"
    for name in ("exp", "tanh", "erf"):
        lines.append(f"void {name}_all(const float *x, float *y, int64_t n) {{ {loop} y[i] = {name}_of(x[i]); }}")
    source = folder / "elementary.c"
    source.write_text("\n".join(lines))
    found = kernels()
    assert found is not None
    flags = next(units[found.instructions] for units in UNITS.values() if found.instructions in units)
    visible = [flag for flag in FLAGS if "visibility" not in flag]
    try:
        find_compiler().run(
            *visible, *flags, f"-I{SOURCES}", "-shared", str(source), "-o", str(folder / "elementary.so")
        )
    except NotCompiled as error:
        pytest.skip(str(error))
    library = ctypes.CDLL(str(folder / "elementary.so"))

    def call(name: str, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        function = getattr(library, f"{name}_all")
        function(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(x.numel()))
        return y

    return call


@pytest.mark.parametrize("name, most", [("exp", 1.0), ("tanh", 2.0), ("erf", 2.0)])
def test_elementary_functions_are_near_float64(
    elementary: Callable[[str, Tensor], Tensor], name: str, most: float
) -> None:
    """Errors in units in the last place over every exponent of float32; exact zeros, infinities, not-a-number.

    Conclusive: 400,000 numbers against torch's float64 functions; an approximation of 1.5e-7 misses by thousands of
    units near 0."""
    x = every_size()
    exact = getattr(torch, name)(x.double())
    assert_ulps(elementary(name, x), exact, most)
    if name == "exp":
        assert elementary("exp", torch.tensor([-float("inf"), -150.0, -3e38])).tolist() == [0.0, 0.0, 0.0]
        assert float(elementary("exp", torch.zeros(1))) == 1.0


def activation64(name: str, x: Tensor) -> Tensor:
    function: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": nn.functional.silu,
        "gelu": nn.functional.gelu,
        "relu": nn.functional.relu,
    }
    return function.get(name, lambda v: nn.functional.gelu(v, approximate="tanh"))(x.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_near_float64_and_the_modules(native: Kernels, name: str, dtype: torch.dtype) -> None:
    """Each is computed in float32 and rounded once: within one rounding of float64 and, in any type, no further from it
    than the module of `transformers` is.

    The error before the rounding: 1 + tanh and 1 + erf keep an absolute error of some units of 1 for negative x, so
    6 u |x|; the module errs as much. Conclusive: numbers from -12 to 12 with the special ones."""
    x = torch.cat([torch.linspace(-12, 12, 40_001), SPECIAL[:7]]).to(dtype)
    found, exact = native.activate(name, x), activation64(name, x)
    usual = exact.isfinite()
    assert torch.equal(found.isnan(), x.isnan() | (x.isinf() & found.isnan()))
    error = (found.double() - exact).abs()[usual]
    # 2^-25: half of the least subnormal number of float16
    assert bool(
        (error <= 1.001 * ROUNDOFF[dtype] * exact.abs()[usual] + 6 * U * x.double().abs()[usual] + 2**-25).all()
    )
    theirs = (ACT2FN[name](x).double() - exact).abs()[usual]
    assert float(error.max()) <= 1.01 * float(theirs.max()) + 4 * U


def norms(size: int, dtype: torch.dtype) -> list[tuple[nn.Module, Norm]]:
    """Modules of `transformers` and torch, and the norms that stand for them."""
    gain, bias = torch.randn(size), torch.randn(size)
    llama, gemma = LlamaRMSNorm(size).to(dtype), GemmaRMSNorm(size).to(dtype)
    cohere, plain = CohereLayerNorm(size).to(dtype), nn.LayerNorm(size).to(dtype)
    for module in (llama, gemma, cohere, plain):
        module.weight.data.copy_(gain)
    plain.bias.data.copy_(bias)
    rounded, shift = llama.weight.data.float(), plain.bias.data.float()
    return [
        (llama, Norm(rounded, epsilon=1e-6)),
        (gemma, Norm(1 + rounded, epsilon=1e-6, rounds_first=False)),
        (cohere, Norm(rounded, epsilon=1e-5, rounds_first=False, is_centered=True)),
        (plain, Norm(rounded, shift, epsilon=1e-5, rounds_first=False, is_centered=True)),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", (1, 15, 16, 17, 576, 1000))
def test_norms_are_near_float64_and_the_modules(native: Kernels, size: int, dtype: torch.dtype) -> None:
    """Norms of Llama, Gemma, Cohere and nn.LayerNorm, of sizes beside 16 lanes.

    The result errs by the rounding of the type, twice where it is rounded before the gain, and by (size / 16 + 12) u of
    the sums and operations. Conclusive: the float64 value is of the module itself, and a mean left out is far away."""
    torch.manual_seed(size)
    x = (torch.randn(9, size) + 0.5).to(dtype)
    for module, norm in norms(size, dtype):
        found = native.normalize(norm, x)
        with torch.no_grad():
            theirs = module(x)
        sums = x.double() - (x.double().mean(-1, keepdim=True) if norm.is_centered else 0)
        exact = sums / (sums.pow(2).mean(-1, keepdim=True) + norm.epsilon).sqrt() * norm.gain.double()
        exact = exact if norm.bias is None else exact + norm.bias.double()
        # A mean errs by the size of x over the deviation, which is what a norm of one element, all mean, shows.
        scale = exact.abs() + (0 if norm.bias is None else norm.bias.double().abs()) + norm.gain.double().abs()
        shift = x.double().abs().amax(-1, keepdim=True) / (sums.pow(2).mean(-1, keepdim=True) + norm.epsilon).sqrt()
        own = (size / 16 + 12) * U * (scale + (norm.gain.double().abs() * shift if norm.is_centered else 0))
        rounding = (2.01 if norm.rounds_first else 1.01) * ROUNDOFF[dtype] * exact.abs()
        assert bool(((found.double() - exact).abs() <= own + rounding + 2**-25).all()), type(module)
        step = 2 * ROUNDOFF[dtype] * (2 if norm.rounds_first else 1)
        assert torch.allclose(found.double(), theirs.double(), rtol=step, atol=float(own.max()) + 2**-24), type(module)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_have_their_bits_in_any_company(native: Kernels, dtype: torch.dtype) -> None:
    """Norms and activations of rows alone, in batches of 1 to 512 beside rows that are not numbers, on 1 to 4 threads,
    and of an element at every place of a vector.

    Conclusive: bits are compared."""
    torch.manual_seed(3)
    x = torch.randn(512, 83).to(dtype)
    x[1::3] = float("nan")
    kept = [i for i in range(512) if i % 3 != 1]
    torch.set_num_threads(1)
    for _, norm in norms(83, dtype):
        whole = native.normalize(norm, x)
        assert torch.equal(whole[kept], torch.cat([native.normalize(norm, x[i : i + 1]) for i in kept]))
        for turn, width in enumerate((*range(1, 71), 127, 128, 129, 511, 512)):
            torch.set_num_threads(1 + turn % 4)
            assert torch.equal(
                native.normalize(norm, x[:width])[kept_below(kept, width)], whole[kept_below(kept, width)]
            )
    numbers = (3 * torch.randn(200)).to(dtype)  # in all ranges of erf
    for name in ACTIVATIONS:
        torch.set_num_threads(1)
        alone = torch.cat([native.activate(name, numbers[i : i + 1]) for i in range(200)])
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            for first, end in ((0, 200), (1, 200), (7, 38), (0, 15)):
                assert torch.equal(native.activate(name, numbers[first:end]), alone[first:end])


def kept_below(kept: list[int], width: int) -> list[int]:
    return [i for i in kept if i < width]


def test_instruction_sets_share_their_bits(tmp_path: Path) -> None:
    """Activations, tanh and norms by AVX2 and by AVX-512, in every type.

    Conclusive: each is loaded from a library of its own, and bits are compared, of not-a-number too."""
    found = []
    for name in ("avx2", "avx512"):
        copied = shutil.copy(LIBRARY, tmp_path / f"{name}.so")
        try:
            other = Kernels(Path(copied), name)
        except ConfigError:
            pytest.skip(f"this processor or library lacks {name}")
        torch.manual_seed(0)
        results = [other.tanh(every_size(20_000))]
        for dtype in DTYPES:
            results += [other.activate(each, every_size(20_000).to(dtype)) for each in ACTIVATIONS]
            results += [other.normalize(norm, torch.randn(5, 83).to(dtype)) for _, norm in norms(83, dtype)]
        found.append(results)
    for first, second in zip(*found, strict=True):
        assert torch.equal(first.isnan(), second.isnan())
        assert torch.equal(first.nan_to_num(), second.nan_to_num())


def test_the_argmax_is_torchs(native: Kernels) -> None:
    """The first of equal largest numbers, in rows of 1 to 70 and more numbers; not-a-number counts as the largest.

    Conclusive: few distinct values, so nearly every row has ties, against torch's argmax, which decoding uses."""
    random = torch.Generator().manual_seed(1)
    for size in (*range(1, 71), 1000, 49_152):
        x = torch.randint(-3, 3, (16, size), generator=random).float()
        x[3] = -float("inf")
        x[4, size // 2 :] = float("nan")
        x[5, -1] = float("inf")
        x[6] = 0.0
        x[6, ::2] = -0.0
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(native.argmax(x), x.argmax(-1))


WRONG = {  # a change of two good rows, the second on a path: the words that name it
    "sequence beyond": ("sequence", 1, 1, "sequence"),
    "sequence negative": ("sequence", 0, -1, "sequence"),
    "slot beyond": ("slot", 0, 64, "slot"),
    "slot negative": ("slot", 1, -1, "slot"),
    "base beyond its blocks": ("base", 0, 33, "base"),
    "base negative": ("base", 1, -1, "base"),
    "base and path not at position": ("position", 1, 20, "position"),
    "position negative": ("position", 0, -1, "position"),
    "path slot beyond": ("path", 1, 64, "path"),
    "path slot negative": ("path", 0, -1, "path"),
    "path_start not from 0": ("path_start", 0, 1, "start"),
    "path_start not ascending": ("path_start", 1, 3, "path_start"),
    "table_start not from 0": ("table_start", 0, 1, "start"),
    "block beyond": ("table", 1, 8, "block"),
    "block negative": ("table", 0, -1, "block"),
}


@pytest.mark.parametrize("name", ["none", *WRONG])
def test_rows_outside_their_cache_are_refused(native: Kernels, name: str) -> None:
    """Each index of the rows, one too large and one negative, is refused by a line that names it.

    Conclusive: the rows without the change are accepted."""
    arrays = {
        "sequence": [0, 0], "position": [16, 18], "slot": [40, 41], "base": [17, 17],
        "path_start": [0, 0, 2], "path": [40, 41], "table_start": [0, 4], "table": [3, 5, 6, 7],
    }  # fmt: skip
    rows = {key: numpy.array(v, dtype=numpy.int64 if "start" in key else numpy.int32) for key, v in arrays.items()}
    if name == "none":
        native.rows(block_count=8, block_size=8, **rows)
        return
    array, index, value, told = WRONG[name]
    rows[array][index] = value
    with pytest.raises(ValueError, match=told):
        native.rows(block_count=8, block_size=8, **rows)
