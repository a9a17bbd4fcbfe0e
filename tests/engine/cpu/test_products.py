"""Native products: every output of a row is one running sum along k, in every tile, thread, instruction set, compiler.

Each library here is called by `ctypes` alone, in several copies, so that instruction sets stand beside each other.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from specdec.engine.cpu.compile_kernels import LIBRARY, Compiler, NotCompiled, find_compiler
from tests.support.exact_sums import fused
from tests.support.native_products import TYPES, Array, Library, as_type, bits, build

INSTRUCTIONS = ("avx2", "avx512", "avx512_bf16", "neon")
ROW_COUNTS = (*range(1, 71), 127, 128, 129, 511, 512)
UNIT_ROUNDOFF = 2.0**-24
SMALLEST_NORMAL = 2.0**-126
# Sizes that end inside a panel, a pair, and a block along k; outputs of several blocks of panels.
SHAPES = ((1, 1), (16, 2), (33, 255), (90, 513), (200, 77))
LibraryOf = Callable[[str], Library]


@pytest.fixture(scope="module")
def library_of(tmp_path_factory: pytest.TempPathFactory) -> LibraryOf:
    """A loaded copy of the installed library that runs an instruction set; skips where it cannot."""
    if not LIBRARY.exists():
        pytest.skip("no native kernels were compiled here")

    @cache
    def load(instructions: str) -> Library:
        library = Library(
            Path(shutil.copy(LIBRARY, tmp_path_factory.mktemp(instructions) / "kernels.so")), instructions
        )
        if not library.is_usable:
            pytest.skip(f"this machine has no {instructions}")
        return library

    return load


@pytest.fixture
def compiler() -> Compiler:
    """The C compiler of this machine."""
    try:
        return find_compiler()
    except NotCompiled as error:
        pytest.skip(str(error))


def random_case(shape: tuple[int, int], rows: int, weight_type: str, x_type: str) -> tuple[Array, Array, Array]:
    """A weight, a bias and rows of these types."""
    generator = np.random.default_rng(shape[1])
    weight = as_type(generator.standard_normal(shape), weight_type)
    bias = generator.standard_normal(shape[0]).astype(np.float32)
    return weight, bias, as_type(generator.standard_normal((rows, shape[1])), x_type)


def in_stated_order(x: Array, weight: Array, bias: Array) -> Array:
    """The products as products.h states their order."""
    sums = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    for k in range(weight.shape[1]):
        sums = fused(x[:, k : k + 1].astype(np.float32), weight[None, :, k].astype(np.float32), sums)
    return sums + bias


def rows_that_differ(library: Library, counts: tuple[int, ...], weight_type: str, x_type: str) -> list[int]:
    """Row counts, on 1 to 4 threads in turns, at which a row among others has other bits than alone."""
    weight, bias, x = random_case((90, 601), max(counts), weight_type, x_type)
    packed = library.pack(weight, weight_type, bias)
    alone = np.concatenate([packed.product(row[None], x_type) for row in x])
    return [
        count
        for turn, count in enumerate(counts)
        if (bits(packed.product(x[:count], x_type, threads=turn % 4 + 1)) != bits(alone[:count])).any()
    ]


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("weight_type", TYPES)
def test_a_product_is_that_of_float64_within_the_bound_of_a_running_sum(
    library_of: LibraryOf, instructions: str, weight_type: str
) -> None:
    """Claim: each output is sum(x * w) + bias, to the accuracy of one running sum in float32.

    A running sum of n fused multiply-adds rounds n times, each by at most u = 2^-24 of the partial sum, so its error is
    at most n u / (1 - n u) * sum |x w| (Higham 2002, section 3.1); the bias adds one rounding. vdpbf16ps rounds at most
    twice a pair, which is n again, and takes denormal numbers as zero: at most 2 * 2^-126 (1 + |x| + |w|) a step.
    Conclusive: the bound is a theorem, and one lost or doubled term of thousands exceeds it.
    """
    library = library_of(instructions)
    for shape in SHAPES:
        for x_type in TYPES:
            weight, bias, x = random_case(shape, 13, weight_type, x_type)
            got = library.pack(weight, weight_type, bias).product(x, x_type)
            wide_x, wide_weight = x.astype(np.float64), weight.astype(np.float64)
            magnitudes = np.abs(wide_x) @ np.abs(wide_weight).T + np.abs(bias)
            roundings = (shape[1] + 2) * UNIT_ROUNDOFF
            bound = roundings / (1 - roundings) * magnitudes + shape[1] * SMALLEST_NORMAL * 16
            assert (np.abs(got - (wide_x @ wide_weight.T + bias)) <= bound).all(), (shape, x_type)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("weight_type, x_type", [(name, name) for name in TYPES] + [("bfloat16", "float32")])
def test_a_row_has_the_same_bits_at_every_number_of_rows_and_threads(
    library_of: LibraryOf, instructions: str, weight_type: str, x_type: str
) -> None:
    """Claim: the bits of a row depend on neither the rows beside it, nor their number, nor the number of threads.

    Conclusive: every row of every count is compared, bit for bit, with the row alone; random sums of 601 terms do not
    agree by chance in another order (see the planted mistakes below).
    """
    assert rows_that_differ(library_of(instructions), ROW_COUNTS, weight_type, x_type) == []


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("name", TYPES)
def test_not_a_number_stays_in_its_row(library_of: LibraryOf, instructions: str, name: str) -> None:
    """Claim: numbers of other rows, and memory between and behind rows, are never part of a row's result, nor written.

    Conclusive: all of them are not-a-number, which no multiplication by zero hides; in_size is odd, so the last pair
    would take in the number behind the row.
    """
    weight, bias, x = random_case((50, 301), 40, name, name)
    packed = library_of(instructions).pack(weight, name, bias)
    spoilt = x.copy()
    spoilt[::2] = np.nan
    for count in (2, 7, 8, 9, 40):
        got = packed.product(spoilt[:count], name, gap=3)
        assert (bits(got[1::2]) == bits(packed.product(x[1:count:2], name))).all(), count
        assert np.isnan(got[::2]).all(), count


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("x_type", TYPES)
def test_the_family_fma_adds_in_the_stated_order(library_of: LibraryOf, weight_type: str, x_type: str) -> None:
    """Claim: AVX2, AVX-512 and NEON have the bits of the order that products.h states, so those of each other.

    Conclusive: the order is written again in numpy, with an exact fused multiply-add, and every bit is compared at one
    row (a tile alone) and at 13 (several tiles).
    """
    weight, bias, x = random_case((37, 301), 13, weight_type, x_type)
    stated = in_stated_order(x, weight, bias)
    checked = []
    for instructions in ("avx2", "avx512", "neon"):
        try:
            packed = library_of(instructions).pack(weight, weight_type, bias)
        except pytest.skip.Exception:
            continue
        assert (bits(packed.product(x, x_type)) == bits(stated)).all(), instructions
        assert (bits(packed.product(x[:1], x_type)) == bits(stated[:1])).all(), instructions
        checked.append(instructions)
    if not checked:
        pytest.skip("this machine runs no instruction set of the family")


def own_unit(library_of: LibraryOf) -> str:
    """An instruction set of the family fma that this machine runs."""
    for instructions in ("avx2", "neon"):
        try:
            library_of(instructions)
        except pytest.skip.Exception:
            continue
        return instructions
    pytest.skip("this machine runs no instruction set of the family")


MISTAKES = {
    # Sums of products of several tiles begin anew at each block of k, and the parts are added.
    "a split by rows": [
        ("sums[r][p] = v16_load(t->sums + r * t->sums_stride + p * LANES);", "sums[r][p] = v16_zero();"),
        (
            "v16_store(t->sums + r * t->sums_stride + p * LANES, sums[r][p]);",
            "v16_store(t->sums + r * t->sums_stride + p * LANES,"
            " v16_add(sums[r][p], v16_load(t->sums + r * t->sums_stride + p * LANES)));",
        ),
    ],
    # The two halves of a pair change places in tiles of an odd number of rows.
    "a tail in another order": [
        (
            "for (int half = 0; half < step; half++) {",
            "for (int turn = 0; turn < step; turn++) { const int half = rows > 1 && rows % 2 ? step - 1 - turn : turn;",
        )
    ],
    # A row alone adds even and odd k in sums of their own.
    "a lane sum": [
        (
            "    int64_t k = 0;\n    for (; k + step",
            "    v16 odd = v16_zero();\n    int64_t k = 0;\n    for (; k + step",
        ),
        (
            "                for (int p = 0; p < panels; p++) {\n                    sums[r][p] = kind",
            "                for (int p = 0; p < panels; p++) {\n"
            "                    if (rows == 1 && p == 0 && half) {\n"
            "                        odd = v16_fma(v16_all(unit), weights[p], odd);\n"
            "                        continue;\n"
            "                    }\n"
            "                    sums[r][p] = kind",
        ),
        (
            "    if (k == units) return;\n",
            "    if (rows == 1) sums[0][0] = v16_add(sums[0][0], odd);\n    if (k == units) return;\n",
        ),
    ],
}


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_planted_mistakes_are_found(
    library_of: LibraryOf, compiler: Compiler, tmp_path: Path, mistake: str | None
) -> None:
    """Claim: the comparison of row counts finds each kind of mistake that it is there for.

    Conclusive: the same sources pass it unaltered, and fail it with a split by rows, a tail in another order or a sum
    over lanes written into them.
    """
    changes = {"tiles.h": MISTAKES[mistake]} if mistake else {}
    library = build(tmp_path, compiler, own_unit(library_of), changes)
    found = rows_that_differ(library, (1, 2, 3, 5, 8, 13, 64), "bfloat16", "bfloat16")
    assert bool(found) == bool(mistake), found


def test_products_without_memory_have_the_same_bits(library_of: LibraryOf, compiler: Compiler, tmp_path: Path) -> None:
    """Claim: where no scratch can be had, products run in small blocks on the stack, with the same bits.

    Conclusive: in this build the pool never gives memory.
    """
    unit = own_unit(library_of)
    refuse = ("{ return enlarged(&own, bytes); }", "{ return bytes == 0 ? enlarged(&own, bytes) : NULL; }")
    poor = build(tmp_path, compiler, unit, {"parallel.c": [refuse]})
    for name in TYPES:
        weight, bias, x = random_case((90, 601), 21, name, name)
        packed, rich = poor.pack(weight, name, bias), library_of(unit).pack(weight, name, bias)
        for count in (1, 7, 21):
            expected = bits(rich.product(x[:count], name))
            assert (bits(packed.product(x[:count], name, threads=2)) == expected).all(), (name, count)
    values = np.random.default_rng(5).integers(0, 16, (90, 608)).astype(np.int8)
    scales, minima = (np.random.default_rng(seed).standard_normal((90, 19)).astype(np.float16) for seed in (6, 7))
    for name in TYPES:
        x = random_case((90, 608), 21, name, name)[2]
        packed, rich = (own.pack_groups(4, values, scales, minima) for own in (poor, library_of(unit)))
        for count in (1, 7, 21):
            assert (bits(packed.product(x[:count], name)) == bits(rich.product(x[:count], name))).all(), (name, count)


def find_clang() -> Compiler:
    """clang, of its own or within the package ziglang; skips where there is none."""
    if shutil.which("clang"):
        return Compiler(("clang",))
    zig = (sys.executable, "-m", "ziglang")
    if shutil.which("zig"):
        return Compiler(("zig", "cc"))
    if subprocess.run([*zig, "version"], capture_output=True, check=False).returncode:
        pytest.skip("no clang here, nor the package ziglang")
    return Compiler((*zig, "cc"))


@pytest.mark.more
@pytest.mark.parametrize("name", TYPES)
def test_clang_and_gcc_agree(library_of: LibraryOf, tmp_path: Path, name: str) -> None:
    """Claim: the order is the source's, not the compiler's: clang's products have the bits of the installed library's.

    Conclusive: another compiler that reordered or fused anything would differ in most sums of 601 random terms.
    """
    for instructions in INSTRUCTIONS:
        try:
            installed = library_of(instructions)
        except pytest.skip.Exception:
            continue
        other = build(tmp_path / instructions, find_clang(), instructions, optimization="-O3")
        weight, bias, x = random_case((90, 601), 64, name, name)
        expected, got = (library.pack(weight, name, bias) for library in (installed, other))
        for count in (1, 8, 64):
            assert (bits(got.product(x[:count], name)) == bits(expected.product(x[:count], name))).all(), instructions


def test_two_threads_that_call_at_once_get_their_own_results(library_of: LibraryOf) -> None:
    """Claim: callers at the same time, with any and changing numbers of threads, never disturb each other.

    Conclusive: each of 4 threads repeats a product of its own 60 times, on 1 to 6 threads, beside the others; the pool
    serves one of them, the others run alone; every bit of every result is compared.
    """
    library = library_of(own_unit(library_of))
    wrong: list[Any] = []

    def repeat(seed: int) -> None:
        weight, bias, x = random_case((300, 200 + seed), 20, "float32", "float32")
        packed = library.pack(weight, "float32", bias)
        expected = bits(packed.product(x, "float32"))
        for turn in range(60):
            threads = (turn + seed) % 6 + 1
            if (bits(packed.product(x, "float32", threads=threads)) != expected).any():
                wrong.append((seed, threads))

    callers = [Thread(target=repeat, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_denormal_numbers_count_and_the_callers_mode_is_kept(library_of: LibraryOf) -> None:
    """Claim: results do not depend on whether the caller flushes denormal numbers, and it still does afterwards.

    Conclusive: the sums are denormal on every thread (1 to 3), and torch's own arithmetic shows the mode kept.
    """
    library = library_of(own_unit(library_of))
    weight = np.full((64, 1), 2.0**-70, np.float32)
    x = np.full((3, 1), 2.0**-70, np.float32)
    packed = library.pack(weight, "float32")
    tiny = torch.tensor([2.0**-126])
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush denormal numbers here")
    try:
        results = [packed.product(x, "float32", threads=threads) for threads in (1, 2, 3)]
        still_flushes = bool((tiny * 0.5 == 0).all())
    finally:
        torch.set_flush_denormal(False)
    assert all((bits(result) == bits(np.float32([2.0**-140]))).all() for result in results)
    assert still_flushes


IN_A_PROCESS = """
import os, sys, threading, time
import numpy as np
from pathlib import Path
from tests.support.exact_sums import fused
from tests.support.native_products import Library, bits
library = Library(Path(sys.argv[1]), sys.argv[2])
x = np.random.default_rng(1).standard_normal((8, 512)).astype(np.float32)
packed = library.pack(np.random.default_rng(2).standard_normal((512, 512)).astype(np.float32), "float32")
expected = bits(packed.product(x, "float32"))
is_right = lambda threads: bool((bits(packed.product(x, "float32", threads=threads)) == expected).all())
done = threading.Event()
def use():
    while not done.is_set():
        assert is_right(3)
user = threading.Thread(target=use)
user.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        os._exit(0 if is_right(1) and is_right(3) and is_right(2) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
done.set()
user.join()
assert is_right(4)
time.sleep(0.2)
before = time.process_time()
time.sleep(1)
print("used", time.process_time() - before)
"""


def test_a_forked_child_has_a_pool_of_its_own_and_sleeping_threads_use_no_processor(library_of: LibraryOf) -> None:
    """Claim: a child forked while the pool works multiplies with threads of its own; threads without work sleep.

    Conclusive: ten children, forked beside a thread that keeps the pool busy, each compare products on 1, 3 and 2
    threads; then the process with 4 threads of the pool uses less than 0.1 s of processor time in a second without
    calls, where one thread that spins uses 1 s.
    """
    unit = own_unit(library_of)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_A_PROCESS, str(LIBRARY), unit],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("used")[1]) < 0.1
