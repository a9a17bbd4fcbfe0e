"""The one module that imports Triton, which torch's wheels for CUDA bring and others lack: what kernels are written
with, and how one is launched.

Without Triton the kernels are plain functions that nothing calls. With TRITON_INTERPRET=1, set before the first import,
they run in Triton's interpreter, which computes with 16-bit numbers of type bfloat16 wrongly and without an error:
kernels widen all numbers they read to float32, and in the interpreter those of a `tl.dot` too (`WIDE`).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    triton = tl = constexpr = gdc_launch_dependents = gdc_wait = None

logger = logging.getLogger("specdec.engine")

if triton is not None and triton.knobs.runtime.interpret:  # kernels run one after the other: there is no wait

    def gdc_wait() -> None:
        pass

    def gdc_launch_dependents() -> None:
        pass


PREBUILT = Path(__file__).with_name("prebuilt")  # in images: what Triton would compile in C (deploy/prebuild.py)
refused: set[torch.device] = set()
ALIGNMENT = 16  # bytes: Triton compiles another binary for an address that is no multiple of it
DEPENDENT_CAPABILITY = (9, 0)  # of GPUs that start a kernel before the one before it has ended
is_dependent: ContextVar[bool] = ContextVar("is_dependent", default=False)


def is_there() -> bool:
    """Whether Triton is installed: only then may a kernel be launched."""
    return triton is not None


@functools.cache
def can_start() -> bool:
    """Whether Triton finds what it starts with; if not, one line in the log says what it lacks."""
    reason = what_is_missing()
    if reason:
        logger.warning("our own kernels are not used, torch computes in their place: %s", reason)
    return not reason


def what_is_missing() -> str:
    """Returns what Triton lacks to start, "" if nothing.

    Before its first launch Triton compiles a module in C, with Python's headers, links it to the driver's library, and
    keeps it, as all that it compiles, in its cache: with a filled cache, or PREBUILT, it needs no compiler.
    """
    if not is_there():
        return "Triton is not installed"
    if is_interpreted():
        return ""
    folder = Path(triton.knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"its cache {folder} cannot be written ({error.strerror}): TRITON_CACHE_DIR names another folder"
    try:
        start()
    except Exception as error:  # also AssertionError and CalledProcessError
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        needs = "a C compiler (gcc or clang in PATH, or CC), Python's headers and libcuda.so.1"
        return f"{what} Triton needs {needs}, or a cache filled where these are (TRITON_CACHE_DIR, now {folder})"
    return ""


def start() -> None:
    """Has Triton load its module in C, as it would before the first launch. Raises what Triton raises."""
    from triton.backends.nvidia import driver

    source = Path(driver.__file__).with_name("driver.c").read_bytes()
    module = PREBUILT / f"{hashlib.sha256(source).hexdigest()}.so"
    build, plain = triton.knobs.build, triton.knobs.build.impl
    if module.is_file():
        build.impl = lambda *_: str(module)
    try:
        driver.CudaUtils()
    finally:
        build.impl = plain


def is_usable(device: torch.device) -> bool:
    """Whether the kernels of the sampler run on a device: a GPU on which none of them failed."""
    return device.type == "cuda" and device not in refused and can_start()


def refuse(device: torch.device, reason: str) -> None:
    """Ends the use of the sampler's kernels on a device, with a line in the log."""
    refused.add(device)
    logger.warning("sampling by kernels is not used on %s: %s", device, reason)


def version() -> str | None:
    """Returns the version of Triton, on which the bits of results depend; None without Triton."""
    return triton.__version__ if is_there() else None


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU."""
    return is_there() and bool(triton.knobs.runtime.interpret)


@contextmanager
def dependent(is_on: bool) -> Iterator[None]:
    """Within it this thread's launches of kernels that know how to wait (`PDL`) begin before the kernel before them has
    ended: programmatic dependent launch. For GPUs of DEPENDENT_CAPABILITY and later."""
    token = is_dependent.set(is_on)
    try:
        yield
    finally:
        is_dependent.reset(token)


def jit(*names: str, checks: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Returns `triton.jit` for a kernel whose arguments `names` are numbers of rows or items: no value of them, not
    even 1 or a multiple of 16, has a binary of its own. `checks`: what the kernel asserts is checked on the device."""
    return triton.jit(do_not_specialize=list(names), debug=checks) if is_there() else lambda kernel: kernel


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: torch.Tensor | int | None, warps: int, stages: int, **constants: Any
) -> None:
    """Launches a kernel on the current device's current stream.

    A missing tensor (None) is read and written nowhere. Raises ValueError for a tensor that does not begin at a
    multiple of 16 bytes or is not contiguous.
    """
    for place, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor) and (argument.data_ptr() % ALIGNMENT or not argument.is_contiguous()):
            raise ValueError(f"argument {place} of {kernel.__name__} must be contiguous from a multiple of 16 bytes on")
    constants |= {"STAGES": stages, "WIDE": is_interpreted(), "PDL": is_dependent.get()}
    known = {name: value for name, value in constants.items() if name in kernel.arg_names}
    # A kernel that does not wait by itself starts when the one before it has ended.
    early = {"launch_pdl": True} if known.get("PDL") else {}
    kernel[grid](*arguments, **known, num_warps=warps, num_stages=stages, **early)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as `launch` takes it, contiguous from a multiple of 16 bytes on: itself, or a copy."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def cdiv(count: int, size: int) -> int:
    """Returns how many tiles of `size` hold `count`."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """Returns the smallest power of two that is at least `count` >= 1: the sizes of tiles are powers of two."""
    return 1 << (count - 1).bit_length()
