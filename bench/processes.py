"""Processes as the kernel sees them: CPU time used, by one or by all of the machine, and priority."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UTIME_FIELD, _STIME_FIELD = 11, 12  # of /proc/PID/stat, counted after the name


def cpu_seconds(pid: int) -> float:
    """CPU time a running process has used, user and system, all threads; in steps of a tick, usually 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[_UTIME_FIELD]) + int(fields[_STIME_FIELD])) / _TICKS_PER_S


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
