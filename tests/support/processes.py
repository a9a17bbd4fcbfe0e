"""Processes of benchmarks: their command lines and environment, and, as the kernel sees them, CPU time and priority."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from specdec.launch.children import python_command

ROOT = Path(__file__).resolve().parents[2]  # of the checkout
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SCHEDULED_CLOCK = 2  # CPUCLOCK_SCHED of the kernel: to the nanosecond, where /proc counts ticks of 10 ms


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command line of a process that runs a module of the checkout, in whatever folder it is started."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return ["env", f"PYTHONPATH={path}", *python_command("-m", module, *arguments)]


@contextlib.contextmanager
def variables(added: dict[str, str]) -> Iterator[None]:
    """Processes begun meanwhile have these in their environment."""
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def cpu_seconds(pid: int) -> float:
    """CPU time a running process has used, user and system, all threads. OSError where there is no such process."""
    return time.clock_gettime(~pid << 3 | _SCHEDULED_CLOCK)


def machine_cpu_seconds() -> float:
    """CPU time this machine has spent on anything since it started, what its host withheld included."""
    first = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0]
    user, nice, system, _idle, _waiting, *interrupts_and_stolen = map(int, first.split()[1:9])
    return (user + nice + system + sum(interrupts_and_stolen)) / _TICKS_PER_S


def set_priority(pid: int, nice: int) -> bool:
    """Makes a process (all its threads) run before those of a higher `nice`; False where it may not.

    Where the kernel groups processes by session and shares out the cores among the groups, the group is moved too.
    """
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)
    except PermissionError:
        return False
    with contextlib.suppress(OSError):  # no groups on this kernel
        Path(f"/proc/{pid}/autogroup").write_text(str(nice), encoding="utf-8")
    return True
