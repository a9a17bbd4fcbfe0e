"""Dependent launch: what every kernel reads and writes before it waits for the one before it, and the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from specdec.engine.cuda.kernels import launch, norms, tiles
from specdec.engine.cuda.kernels.configs import head_tiles
from specdec.engine.cuda.kernels.products import RowNorm, head, product
from tests.support.interpreter import interpreted
from tests.support.kernel_inputs import EPSILON, rows_of, sums_of, unwritten, vector_of, weight_of
from tests.support.kernel_launches import MODULES, NAMES, Model, launch_step

# The arguments of kernels that no kernel of a step writes.
CONSTANT = ("weight_ptr", "gain_ptr", "query_gain_ptr", "key_gain_ptr", "bias_ptr")
TINY = Model(hidden=64, heads=2, kv_heads=1, size=32, inner=64, vocab=70)


@dataclass
class Watcher:
    """What programs of kernels did before they waited. `faults` name each kernel that did more than it may."""

    faults: set[str] = field(default_factory=set)
    early: set[str] = field(default_factory=set)  # kernels that read before they waited
    kernel: str = ""
    waits: int = 0
    allows: int = 0
    constant: list[tuple[int, int]] = field(default_factory=list)

    def begin_kernel(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        given = dict(zip(kernel.arg_names, arguments))
        found = [given[name] for name in CONSTANT if given.get(name) is not None]
        self.kernel = kernel.__name__
        self.constant = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in found]

    def begin_program(self) -> None:
        self.waits = self.allows = 0

    def end_program(self) -> None:
        if (self.allows, self.waits) != (1, 1):
            self.faults.add(f"{self.kernel} waited {self.waits} times, let the next begin {self.allows} times")

    def read(self, addresses: np.ndarray) -> None:
        if self.waits == 0:
            self.early.add(self.kernel)
            if not all(any(start <= at < end for start, end in self.constant) for at in addresses.tolist()):
                self.faults.add(f"{self.kernel} read before it waited")

    def written(self) -> None:
        if self.waits == 0:
            self.faults.add(f"{self.kernel} wrote before it waited")

    def wait(self) -> None:
        self.waits += 1

    def allow(self) -> None:
        self.allows += 1


@contextmanager
def watched() -> Iterator[Watcher]:
    """Within it launches are dependent, in the interpreter, and a watcher sees every access to memory."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    watcher = Watcher()
    load, store, place = Builder.create_masked_load, Builder.create_masked_store, Builder.set_grid_idx
    plain = launch.launch

    def masked_load(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        watcher.read(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)])
        return load(self, ptrs, mask, *others)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
        watcher.written()
        return store(self, ptrs, value, mask, *others)

    def set_grid_idx(self: Any, *index: int) -> None:
        if any(index):
            watcher.end_program()
        watcher.begin_program()
        place(self, *index)

    def launching(kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
        watcher.begin_kernel(kernel, arguments)
        plain(kernel, grid, *arguments, **options)
        watcher.end_program()

    with (
        mock.patch.multiple(
            Builder, create_masked_load=masked_load, create_masked_store=masked_store, set_grid_idx=set_grid_idx
        ),
        mock.patch.multiple(tiles, gdc_wait=watcher.wait, gdc_launch_dependents=watcher.allow),
        launch.dependent(True),
    ):
        for module in MODULES:
            module.launch = launching
        try:
            yield watcher
        finally:
            for module in MODULES:
                module.launch = plain


@interpreted
def test_every_kernel_of_a_step_waits_before_it_reads_what_others_wrote() -> None:
    """Claim: launched dependently, every program of every kernel lets the next kernel begin, waits once, and before
    that reads weights and gains only and writes nothing; those with a product, and the norm, read them early.

    Conclusive: every address that the interpreter reads or writes is looked at, program by program.
    """
    with watched() as watcher:
        launch_step(TINY, torch.device("cpu"), slots=16)
    assert not watcher.faults
    early = {"product_kernel", "qkv_rope_kernel", "head_kernel", "rms_norm_kernel"}
    assert watcher.early == early and len(NAMES) == 11


@interpreted
def test_a_kernel_that_does_not_wait_is_found() -> None:
    """Claim: the test above finds a kernel that waits for nothing: it has read and written too early."""
    with mock.patch.object(norms, "wait_for_last", lambda PDL: None), watched() as watcher:
        launch_step(TINY, torch.device("cpu"), slots=16)
    faults = ("read before it waited", "wrote before it waited", "waited 0 times, let the next begin 1 times")
    assert watcher.faults == {f"rms_norm_kernel {fault}" for fault in faults}


@interpreted
@pytest.mark.parametrize("inputs", [72, 256])
def test_dependent_products_have_the_same_bits(inputs: int) -> None:
    """Claim: the first weights, loaded before the wait, change no bit of a product, with a tail of inputs or without;
    nor of the output layer. Conclusive: compared bit for bit, in the interpreter."""
    x, weight = rows_of(5, inputs, torch.bfloat16), weight_of(40, inputs, torch.bfloat16)
    norm = RowNorm(sums_of(x, 16), vector_of(inputs, torch.bfloat16), EPSILON)
    found = []
    for is_on in (False, True):
        out, logits = unwritten(8, 40, dtype=torch.bfloat16), unwritten(8, 40)
        best, ids, finite = unwritten(8, head_tiles(40)), *torch.zeros(2, 8, head_tiles(40), dtype=torch.int32)
        with launch.dependent(is_on):
            product(x, weight, out, 5, norm=norm)
            head(x, weight, logits, best, ids, finite, 5)
        found.append((out[:5].view(torch.int16), logits[:5].view(torch.int32)))
    for plain, early in zip(*found):
        assert torch.equal(plain, early)
