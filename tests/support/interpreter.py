"""Tests of kernels in Triton's interpreter: in a process of their own, because Triton reads TRITON_INTERPRET when it is
imported, and what else runs in a test's process must not be interpreted."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

needs_triton = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="Triton is installed on Linux x86_64 alone"
)


def interpret() -> None:
    """Prepares the process: kernels are interpreted, with two changes. Numbers are rounded to bfloat16 as a GPU
    does, to the nearest and if two are near to the even one: the interpreter cuts them off. And a product of bfloat16
    numbers, which it computes wrongly and without an error, is an error. What kernels assert is checked."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a model that is interpreted is on the CPU, also where there is a GPU
    torch.set_num_threads(1)
    np.seterr(invalid="ignore")  # tests have numbers that are none
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

    interpreter_builder.options = replace(interpreter_builder.options, debug=True, sanitize_overflow=False)
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def rounding_cast(self: Any, source: Any, to: Any) -> Any:
        kinds = str(source.dtype.scalar), str(to.scalar)
        if kinds == ("fp32", "bf16"):
            rounded = torch.tensor(np.asarray(source.data)).bfloat16().view(torch.uint16)
        elif kinds == ("bf16", "fp32"):
            rounded = torch.tensor(np.asarray(source.data)).view(torch.bfloat16).float()
        else:
            return cast(self, source, to)
        return TensorHandle(rounded.numpy(), to.scalar)

    def checked_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        kinds = {str(each.dtype.scalar) for each in (a, b)}
        assert kinds == {"fp32"}, f"a product of {kinds}: widen first"
        return dot(self, a, b, *others)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = rounding_cast, checked_dot


@functools.cache
def own_process() -> ProcessPoolExecutor:
    """The process of all interpreted tests of this worker; it starts with the first."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), interpret)


def run_ranks(function: Callable[..., Any], rank_count: int, *arguments: object) -> list[Any]:
    """Calls function(rank, *arguments) for all ranks at once, each in a process of its own with interpreted kernels;
    returns their results, once all are done."""
    with ProcessPoolExecutor(rank_count, multiprocessing.get_context("spawn"), interpret) as processes:
        running = [processes.submit(function, rank, *arguments) for rank in range(rank_count)]
        return [each.result() for each in running]


def run_test(module: str, name: str, arguments: dict[str, object]) -> None:
    """Runs a test by its name; called in the other process."""
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """A test that runs in the process of interpreted kernels. Its arguments are values, no fixtures that hold files or
    patches."""

    @functools.wraps(test)
    def run(**arguments: object) -> None:
        own_process().submit(run_test, test.__module__, test.__name__, arguments).result()

    return needs_triton(run)


def interpreted_without_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """A test of models: on a GPU, where there is one, in this process, with compiled kernels; else `interpreted`."""
    return test if torch.cuda.is_available() else interpreted(test)
