"""Events from a child process to its supervisor, over a pipe of their own.

One line of JSON per event: ready with the address, failed with an error message for the user. A supervised process also
dies with its parent, even if the parent crashes, so no process is left running.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

EVENTS_VARIABLE = "_SPECDEC_EVENTS_FD"  # not among the settings: those begin with SPECDEC_
PARENT_VARIABLE = "_SPECDEC_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def report(**event: Any) -> bool:
    """Sends an event to the supervisor; returns False without a supervisor."""
    number = os.environ.get(EVENTS_VARIABLE)
    if number is None:
        return False
    try:
        os.write(int(number), json.dumps(event).encode() + b"\n")
    except OSError:  # the supervisor has ended or no longer reads; this process continues
        pass
    return True


def die_with_parent() -> None:
    """Has the kernel kill this process when its supervisor ends. No effect without a supervisor."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before the line above
        os._exit(1)
