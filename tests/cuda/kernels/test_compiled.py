"""Kernels compiled for three generations of GPUs, without one: spills, shared memory, tensor cores, arithmetic."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.engine.cuda.kernels.launch import constexpr, jit, tl
from tests.support.interpreter import needs_triton
from tests.support.kernel_launches import MODELS, SHARED_BYTES, Launch, compiled, intermediate, sampler_of, step_of

pytestmark = needs_triton
WITH_TENSOR_CORES = frozenset({"qkv_rope", "attend", "o", "gate_up", "down", "head"})
# Accesses to global memory in PTX; those before the wait of a dependent launch may only be loads of weights and gains.
ACCESS = re.compile(r"\b((?:ld|st|atom|red|cp\.async)[\w.:]*global\S*)")
EARLY = frozenset({"qkv_rope", "o", "gate_up", "down", "rms_norm", "head"})
# Operations on numbers, not on their bits: all of these but widening and rounding.
ARITHMETIC = re.compile(r"^.*(?:\barith\.(?:add|sub|mul|div|rem|neg|max\w*|min\w*|cmp)f|\bmath\.\w+)\b.*bf16.*$", re.M)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles each kernel anew."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def check(name: str, launch: Launch, capability: int) -> None:
    """A kernel keeps what it computes in registers, fits the chip, and multiplies in one way."""
    binary = compiled(launch, capability)
    assert binary.spilled_bytes == 0, name
    assert binary.shared_bytes <= SHARED_BYTES[capability], name
    assert binary.tensor_cores == ({"HMMA"} if name in WITH_TENSOR_CORES else set()), name


def test_the_two_largest_kernels_fit_an_h100() -> None:
    """Claim: on compute capability 9.0 the product of gates and ups and the output layer of an 8B model spill nothing,
    fit the shared memory, and use one kind of instruction for tensor cores, on which the bits of sums depend.

    Conclusive: read off the disassembly of what Triton compiles for that chip.
    """
    step = step_of(MODELS["llama-8b"])
    for name in ("gate_up", "head"):
        check(name, step[name], 90)


def check_dependent(model: str, names: Iterable[str]) -> None:
    """On compute capability 9.0 a kernel of a dependent launch waits, once, before it writes; others never wait."""
    for name, launch in step_of(MODELS[model], pdl=True).items():
        if name in names:
            check(name, launch, 90)
            before, *after = compiled(launch, 90).ptx.split("griddepcontrol.wait;")
            assert len(after) == 1 and before.count("griddepcontrol.launch_dependents;") == 1, name
            early = ACCESS.findall(before)
            assert bool(early) == (name in EARLY) and all(access.startswith("ld.") for access in early), (name, early)
            assert any(access.startswith("st.") for access in ACCESS.findall(after[0])), name
            for capability in (80, 90):
                assert "griddepcontrol" not in compiled(step_of(MODELS[model])[name], capability).ptx, name


def test_the_wait_of_a_dependent_launch() -> None:
    """Claim: with the setting, and for 9.0 only, a kernel lets the next begin and waits for the one before it; before
    the wait a product loads weights, and nothing is written.

    Conclusive: read off what Triton assembles, with the setting and without.
    """
    check_dependent("llama-8b", ("o", "pick"))


@pytest.mark.more
@pytest.mark.parametrize("model", MODELS)
def test_every_kernel_waits(model: str) -> None:
    """Claim: as above for every kernel of a step; with the first weights in registers nothing is spilled."""
    check_dependent(model, WITH_TENSOR_CORES | {"rope_write", "combine", "rms_norm", "embed", "pick"})


@pytest.mark.more
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("model", MODELS)
def test_every_kernel_fits_every_chip(model: str, capability: int) -> None:
    """Claim: as above for every kernel of a step, on compute capabilities 8.0, 9.0 and 10.0, for models with biases,
    other activations, wide heads, softcaps, and of float16. Conclusive: as above."""
    for name, launch in step_of(MODELS[model]).items():
        check(name, launch, capability)


SAMPLER = {"maxima_kernel", "totals_kernel", "limits_kernel", "race_kernel", "finish_kernel", "edit_kernel"}
SAMPLER |= {"tile_maxima_kernel", "tile_sums_kernel", "logprobs_kernel"}


@pytest.mark.more
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("width, dtype", [(128256, torch.float32), (151937, torch.float64)])
def test_every_kernel_of_the_sampler_fits_every_chip(width: int, dtype: torch.dtype, capability: int) -> None:
    """Claim: as above for the kernels that sample, edit and tell logprobs, none of which has products; for widths that
    Triton knows to be a multiple of 16 and others. Conclusive: as above."""
    launches = sampler_of(width, dtype)
    assert launches.keys() == SAMPLER
    for name, launch in launches.items():
        check(name, launch, capability)


@jit()
def adding(x_ptr, WIDE: constexpr):
    """Adds bfloat16 numbers, widened before if WIDE."""
    x = tl.load(x_ptr)
    if WIDE:
        x = x.to(tl.float32)
    tl.store(x_ptr, (x + x).to(x_ptr.dtype.element_ty))


def test_no_kernel_computes_with_bfloat16() -> None:
    """Claim: a kernel widens bfloat16 numbers before it computes with them: Triton's interpreter, on which tests of
    kernels rest, computes with them wrongly and without an error. Products of tensor cores, which sum in float32, are
    widened there alone (`tests.support.interpreter` refuses others).

    Conclusive: every operation of every kernel, in Triton's intermediate language; one that adds them is found.
    """
    types = {"x_ptr": "*bf16", "WIDE": "constexpr"}
    for wide in (False, True):
        planted = intermediate(Launch(adding, types, {(1,): wide}, (0,), warps=1, stages=1))
        assert bool(ARITHMETIC.search(planted)) is not wide
    for model in ("llama-1b", "gemma-2b"):
        for name, launch in step_of(MODELS[model]).items():
            text = intermediate(launch)
            assert "tt.func" in text and "bf16" in text or name == "pick"
            assert not ARITHMETIC.search(text), (name, ARITHMETIC.findall(text))


# Heads, heads of keys and their size, of models whose groups of heads fill lanes in other ways.
HEADS = ((24, 8, 128), (28, 4, 128), (40, 8, 128), (64, 8, 128), (8, 1, 256), (71, 1, 64), (32, 32, 80), (32, 32, 96))


@pytest.mark.more
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("heads, kv_heads, size", HEADS)
def test_attention_fits_for_every_group_of_heads(heads: int, kv_heads: int, size: int, capability: int) -> None:
    """Claim: as above for attention with 16 and 32 lanes, groups of heads that are no power of two, more heads than
    lanes, and sizes that are padded. Conclusive: as above."""
    model = replace(MODELS["llama-8b"], heads=heads, kv_heads=kv_heads, size=size)
    check("attend", step_of(model)["attend"], capability)
