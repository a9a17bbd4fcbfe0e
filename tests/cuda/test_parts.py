"""Blocks outside the pattern of a step of our own kernels, in Triton's interpreter: kernels compute single parts of
them, and a library the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from specdec.engine.cuda import backend as backend_module
from specdec.engine.cuda import item_attention, parts
from specdec.engine.cuda.backend import DeviceBackend
from specdec.engine.cuda.items import GROUP_ROWS
from specdec.engine.cuda.kernels.launch import version
from specdec.engine.cuda.parts import KernelParts
from specdec.engine.interface import Chunk, RaggedBatch, tree_paths
from tests.cuda.test_step import (
    FEW_ROUNDS,
    PARENTS,
    call_of,
    check_logits,
    driver_of,
    other_bits_of_wide_steps,
    raising,
    run_rounds,
)
from tests.support.engine_models import Driver, random_tokens
from tests.support.interpreter import interpreted

ALL = ("attention", "norms", "products", "output layer")
WITHOUT_NORMS = ("attention", "products", "output layer")
# Families outside the pattern: whether steps are captured, which parts kernels compute, and whether torch takes each
# row by itself in all else: norms that it adds up in an operation of its own do not.
FAMILIES = [
    ("gpt2", "bfloat16", True, WITHOUT_NORMS, True),
    ("phi", "float16", False, WITHOUT_NORMS, True),
    ("phi3", "bfloat16", False, ALL, True),
    ("gpt_neox", "float16", False, WITHOUT_NORMS, True),
    ("starcoder2", "float16", False, WITHOUT_NORMS, True),
    ("granite", "float16", False, ALL, True),
    ("smollm3", "float16", True, ALL, True),
    ("olmo2", "float16", False, ALL, True),
    ("cohere", "float16", False, WITHOUT_NORMS, False),
]


def parts_of(driver: Driver) -> KernelParts:
    backend = driver.model.backend
    assert isinstance(backend, DeviceBackend) and call_of(driver) is None and backend._parts is not None
    return backend._parts


@contextmanager
def logged() -> Iterator[list[str]]:
    """The lines of warnings of the engine within it."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]  # one handler's own
    logger = logging.getLogger("specdec.engine")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@interpreted
def test_single_parts_of_a_block_are_computed_by_kernels() -> None:
    """Claim: a model outside the pattern, here with norms behind its products and over all heads together, has its
    norms, products, output layer and attention computed by kernels; prompts, decodes and chains of two sequences have
    the logits that `transformers` has. The numerics profile names Triton's version, the parts, and that rows of 1 and
    17 rows had the same bits. Conclusive: judged by the model in float32; launches of one step are counted."""
    driver = driver_of("normed", "bfloat16", widths=(17, 1))
    found = parts_of(driver)
    assert found.names == ALL and found.has_equal_rows
    named = f"triton {version()} for attention, norms, products, output layer, equal bits in every step"
    assert named == driver.model.description.kernels and named in driver.model.description.libraries
    run_rounds(driver, "normed", "bfloat16", FEW_ROUNDS)
    with mock.patch.multiple(parts, **{name: mock.Mock(wraps=getattr(parts, name)) for name in COUNTED}):
        with mock.patch.object(item_attention, "attend", wraps=item_attention.attend) as attend:
            driver.feed(driver.open(4), [1, 2])
        counts = [getattr(parts, name).call_count for name in COUNTED]
    assert counts == [5, 6, 1] and attend.call_count == 1


COUNTED = ("rms_norm", "product", "head")


@pytest.mark.more
@pytest.mark.parametrize("architecture, dtype, with_graphs, names, is_equal", FAMILIES)
@interpreted
def test_other_families_run_by_parts(
    architecture: str, dtype: str, with_graphs: bool, names: tuple[str, ...], is_equal: bool
) -> None:
    """Claim: as above for every other architecture outside the pattern, of its own shape and padded to a captured one,
    and for a tree, whose rows are those of paths; where torch adds numbers of a row no bits are promised."""
    driver = driver_of(architecture, dtype, with_graphs)
    assert bool(driver.model.backend.graph_count) == with_graphs
    assert parts_of(driver).names == names and (is_equal or not parts_of(driver).has_equal_rows)
    run_rounds(driver, architecture, dtype)
    table, text, nodes = driver.open(60), random_tokens(44, 3), random_tokens(len(PARENTS), 4)
    driver.feed(table, text[:-1], 0)
    driver.cache.prepare_write(table, 48)
    chunk = Chunk(table.block_ids, 43, [text[-1], *nodes], 5, tree_paths(PARENTS, 44))
    rows = driver.model.forward(RaggedBatch((chunk,))).logits.clone()
    for path, last in (([], 0), ([0], 1), ([0, 1], 2), ([0, 2], 3), ([3], 4)):
        check_logits(architecture, dtype, [*text, *(nodes[node] for node in path)], rows[last : last + 1])


def without_last_input(*arguments: Any, **options: Any) -> None:
    """A product that leaves the last input out."""
    x, *others = arguments
    PRODUCT(torch.cat((x[:, :-1], torch.zeros_like(x[:, :1])), 1), *others, **options)


def larger_epsilon(*arguments: Any, **options: Any) -> None:
    *others, epsilon = arguments
    NORM(*others, epsilon + 0.1, **options)


def one_id_late(*arguments: Any, **options: Any) -> None:
    """An output layer whose logits are those of the id before."""
    HEAD(*arguments, **options)
    arguments[2].copy_(arguments[2].roll(1, 1))


def values_as_keys(*arguments: Any, **options: Any) -> None:
    """Values are written where keys belong."""
    *others, keys, values, rows = arguments
    ROPE_WRITE(*others, values, keys, rows, **options)


NORM, PRODUCT, HEAD, ROPE_WRITE = parts.rms_norm, parts.product, parts.head, item_attention.rope_write
# By name: the part, the module and name of its kernel, a broken one, what the line in the log says of it.
FAULTS: dict[str, tuple[str, Any, str, Callable[..., None], str]] = {
    "product": ("products", parts, "product", without_last_input, " off"),
    "norm": ("norms", parts, "rms_norm", larger_epsilon, " off"),
    "head": ("output layer", parts, "head", one_id_late, " off"),
    "attend": ("attention", item_attention, "attend", raising, "out of resource: shared memory"),
    "write": ("attention", item_attention, "rope_write", values_as_keys, "not where they belong"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.more] * (name != "product")) for name in FAULTS]
)
@interpreted
def test_a_faulty_kernel_is_replaced_by_the_library(fault: str) -> None:
    """Claim: a kernel of a part that raises, or with another result, is found at loading, one line names the part, and
    the library computes it as where there are no kernels; the others stay, and no bits are promised. Conclusive: the
    broken kernel is launched no more, and the logits are those of `transformers`."""
    part, module, name, broken, reason = FAULTS[fault]
    with logged() as lines, mock.patch.object(module, name, broken):
        driver = driver_of("normed", "bfloat16")
    of_parts = [line for line in lines if "kernels for" in line]
    assert len(of_parts) == 1 and f"kernels for {part} are not used: " in of_parts[0] and reason in of_parts[0]
    found = parts_of(driver)
    assert found.names == tuple(each for each in ALL if each != part) and not found.has_equal_rows
    assert "bits of a row by its step" in driver.model.description.libraries
    tokens = random_tokens(9, 8)
    with mock.patch.object(module, name, raising):
        check_logits("normed", "bfloat16", tokens, driver.feed(driver.open(20), tokens))


@pytest.mark.more
@interpreted
def test_bits_are_promised_only_where_they_were_equal() -> None:
    """Claim: where a row's bits depend on the number of rows no equal bits are promised, and the library, which is
    faster then, computes products of more rows than a captured step has. Conclusive: a product planted so; the rows
    that the kernel is given."""
    with mock.patch.object(parts, "product", other_bits_of_wide_steps):
        driver = driver_of("normed", "bfloat16")
        assert not parts_of(driver).has_equal_rows
        assert "bits of a row by its step" in driver.model.description.kernels
        with mock.patch.object(parts, "product", mock.Mock(wraps=PRODUCT)) as product:
            driver.feed(driver.open(200), random_tokens(GROUP_ROWS, 1), 1)
            assert product.call_count == 6
            driver.feed(driver.open(200), random_tokens(GROUP_ROWS + 1, 1), 1)
            assert product.call_count == 6


@interpreted
def test_models_in_float32_have_no_kernels() -> None:
    """Claim: a model in float32 keeps the plain way, and its profile names no Triton."""
    with mock.patch.object(backend_module, "kernel_parts", raising):
        driver = driver_of("normed", "float32")
    assert "triton" not in driver.model.description.libraries
