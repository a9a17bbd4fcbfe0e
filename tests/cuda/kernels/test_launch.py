"""What stands around a kernel: its import without Triton, and the tensors it is given."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
import torch

from specdec.engine.cuda.kernels.norms import rms_norm
from tests.hygiene.sources import ROOT, imported_names, modules_below
from tests.support.interpreter import interpreted, needs_triton

KERNELS = "specdec.engine.cuda.kernels"
WITHOUT = """
import importlib, sys
sys.modules["triton"] = None
for name in sys.argv[1:]:
    importlib.import_module(name)
launch = importlib.import_module("specdec.engine.cuda.kernels.launch")
print(launch.is_there(), launch.version())
"""


def test_kernels_can_be_imported_without_triton() -> None:
    """Claim: every module of the kernels is imported where Triton is not installed, as on CPUs, and one function says
    so; only one module imports Triton. Conclusive: a fresh process in which its import fails; every import is read."""
    modules = [module for module in modules_below("specdec") if module.name.startswith(KERNELS)]
    importing = {module.name for module in modules for _, name in imported_names(module) if name.startswith("triton")}
    assert importing == {f"{KERNELS}.launch"}
    command = [sys.executable, "-c", WITHOUT, *(module.name for module in modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "None"], done.stderr


# Of triton.language, what kernels use: all of it is in the wheels of 3.6.0 and of 3.7.1, with the same arguments.
COMMON = set(
    "arange atomic_add atomic_xchg cdiv cumsum debug_barrier device_assert dot exp float32 float64 full int32 int64 "
    "load log max maximum min minimum multiple_of num_programs pointer_type program_id range rsqrt split static_range "
    "store sum uint64 where zeros".split()
)


@needs_triton
def test_kernels_use_what_both_versions_of_triton_have() -> None:
    """Claim: kernels use no part of Triton's language that 3.6 lacks: the suite runs with one version alone, so a new
    name has to be looked up in 3.6 before it is used. Conclusive: every name in every source, and each is there."""
    modules = [module for module in modules_below("specdec") if module.name.startswith(KERNELS)]
    used = {
        node.attr
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tl"
    }
    assert used and used <= COMMON, used - COMMON
    import triton.language

    assert all(hasattr(triton.language, name) for name in COMMON)


@interpreted
def test_a_tensor_for_which_triton_has_another_binary_is_refused() -> None:
    """Claim: a tensor that does not begin at a multiple of 16 bytes, for which Triton would compile another binary, or
    whose rows do not follow each other, is refused before the launch. Conclusive: each is tried, and nothing is
    written."""
    x, gain = torch.ones(3, 64, dtype=torch.bfloat16), torch.ones(65, dtype=torch.bfloat16)
    out = torch.zeros_like(x)
    for bad_x, bad_gain in ((x, gain[1:]), (x.t().contiguous().t(), gain[:64])):
        with pytest.raises(ValueError, match="of rms_norm_kernel must be contiguous from a multiple of 16 bytes on"):
            rms_norm(bad_x, bad_gain, out, 3, 1e-5)
    assert not out.any()
    rms_norm(x, gain[:64], out, 3, 1e-5)
    assert out.all()
