"""Memory safety of the native kernels: plans from a seed, sound and hostile, under the sanitizers of the compiler."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest

from specdec.engine.cpu import kernels as binding
from specdec.engine.cpu.compile_kernels import SOURCES, NotCompiled
from tests.native.plans import ABANDONED, EXCHANGE, FAILING, Plan, hostile_plan, sound_plan
from tests.native.sanitized import Driver, make_driver

PLANS_A_RUN = 200
SHORT_S, LONG_S = 8, 290  # of each of the two kinds of sanitizers, beside the time to compile


@pytest.fixture(scope="module")
def instructions() -> tuple[str, ...]:
    """The instruction sets that this processor runs and whose sources differ: AVX2 or NEON, and the best."""
    found = binding.kernels()
    if found is None:
        pytest.skip("no native kernels here")
    return tuple(dict.fromkeys(("neon" if found.instructions == "neon" else "avx2", found.instructions)))


def driver_of(folder: Path, sanitizers: str, instructions: tuple[str, ...], **options) -> Driver:
    """The driver, or a skipped test where the compiler has no such sanitizer, or a program of it cannot start."""
    try:
        driver = make_driver(folder, sanitizers, instructions, **options)
    except NotCompiled as error:
        if "sanitize" in str(error) or "san" in str(error).rpartition(":")[2]:
            pytest.skip(f"the compiler has no {sanitizers} sanitizer: {error}")
        raise
    verdicts = driver.run([], instructions[0], folder / "none")
    if "unexpected memory mapping" in verdicts.report or "personality" in verdicts.report:
        pytest.skip(f"{sanitizers}: {verdicts.report.splitlines()[0]}")
    assert verdicts.report == ""
    return driver


def fuzz(driver: Driver, folder: Path, seconds: float, seed: int) -> int:
    """Runs plans, every other one hostile, for so long; returns how many. Fails at a report or a wrong verdict."""
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end or count == 0:
        seeds = range(seed + count, seed + count + PLANS_A_RUN)
        plans = [(hostile_plan if one % 2 else sound_plan)(one) for one in seeds]
        for instructions in driver.instructions:
            verdicts = driver.run(plans, instructions, folder / "plans")
            at = seed + count + max(0, len(verdicts.lines) - 1)
            assert verdicts.report == "", f"{instructions}, at the plan of seed {at} or the next:\n{verdicts.report}"
            assert len(verdicts.lines) == len(plans)
            for one, plan, line in zip(seeds, plans, verdicts.lines):
                assert line.startswith("accepted " if plan.is_sound else "refused "), f"seed {one}: {line}"
        count += PLANS_A_RUN
    return count


@pytest.mark.more
def test_no_plan_reaches_memory_that_is_not_its_own(tmp_path: Path, instructions: tuple[str, ...]) -> None:
    """Claim: rows with an index out of range are refused; all others run, on one thread and on several with the same
    bits, without a report of the address or the undefined-behaviour sanitizer.

    Conclusive: every array is an allocation of exactly its size, blocks reach to the last slot, and
    `test_planted_mistakes_are_found` plants what must be reported.
    """
    driver = driver_of(tmp_path, "address,undefined", instructions[-1:], optimization="-O0")
    assert fuzz(driver, tmp_path, SHORT_S, seed=1) >= PLANS_A_RUN


@pytest.mark.more
def test_threads_meet_before_they_read_what_others_wrote(tmp_path: Path, instructions: tuple[str, ...]) -> None:
    """Claim: the thread sanitizer finds no race between the threads of a call, nor between two callers."""
    driver = driver_of(tmp_path, "thread", instructions[-1:])
    assert fuzz(driver, tmp_path, SHORT_S, seed=1_000_001) >= PLANS_A_RUN


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_many_plans(sanitizers: str, tmp_path: Path, instructions: tuple[str, ...]) -> None:
    """Claim: as above, for minutes, over both instruction sets, with seeds of its own; a report names its seed."""
    driver = driver_of(tmp_path, sanitizers, instructions)
    assert fuzz(driver, tmp_path, LONG_S, seed=random.SystemRandom().randrange(2**40)) > PLANS_A_RUN


def whole_steps() -> list[Plan]:
    """Sound plans whose steps run to their end."""
    stopped = EXCHANGE | FAILING | ABANDONED
    return [plan for plan in map(sound_plan, range(400)) if not plan.sizes.flags & stopped]


# file, text, what takes its place, the sanitizer that reports it, a word of the report
PLANTED = {
    "a slot beside its own": (
        "cache.h",
        "slot = rows->slot[row];",
        "slot = rows->slot[row] + 1;",
        "address",
        "heap-buffer-overflow",
    ),
    "a check that lets slots through": (
        "check.c",
        "if (rows->slot[row] < 0 || rows->slot[row] >= slot_count)",
        "if (rows->slot[row] < 0)",
        "address",
        "heap-buffer-overflow",
    ),
    "cross attention to rows that see from 0 on": (
        "step.h",
        "if (!rows->first || rows->first[r] < 1) return 0;",
        "if (rows->first && rows->first[r] < 1) return 0;",
        "address",
        "SEGV",
    ),
    "a list read before its parts are checked": (
        "check.c",
        "if (starts[i + 1] < starts[i]) return 0;",
        "if (starts[i + 1] < 0) return 0;",
        "address",
        "heap-buffer-overflow",
    ),
    "a job before the parts of another have ended": (
        "parallel.c",
        "        await_change(&pool.caller, &pool.left, left, may_spin());",
        "        break;",
        "thread",
        "data race",
    ),
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.slow if "check" in what else pytest.mark.more) for what in PLANTED]
)
def test_planted_mistakes_are_found(what: str, tmp_path: Path, instructions: tuple[str, ...]) -> None:
    """Claim: the same plans find a mistake: an index off by one, a check left out, a wait of the caller left out.

    Conclusive: the sources are the product's with one line changed.
    """
    name, right, wrong, sanitizer, word = PLANTED[what]
    sources = tmp_path / "native"
    shutil.copytree(SOURCES, sources)
    text = (sources / name).read_text(encoding="utf-8")
    assert text.count(right) == 1, f"{name} has changed: {right}"
    (sources / name).write_text(text.replace(right, wrong), encoding="utf-8")
    driver = driver_of(tmp_path, sanitizer, instructions[:1], sources=sources, optimization="-O0")
    plans = whole_steps() + [hostile_plan(seed) for seed in range(400)]
    verdicts = driver.run(plans, instructions[0], tmp_path / "plans")
    assert word in verdicts.report and len(verdicts.lines) < len(plans), verdicts.report[:2000]
