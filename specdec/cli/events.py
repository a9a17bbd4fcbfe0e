"""What a child process tells the process that started it, over a pipe nobody else writes to.

One line of JSON per event: ready with the address, failed with the sentence a person should read. A supervised process
also dies with its parent, however that one ends, so nothing is left running.
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
    """Sends an event to the supervisor; False when there is none."""
    number = os.environ.get(EVENTS_VARIABLE)
    if number is None:
        return False
    try:
        os.write(int(number), json.dumps(event).encode() + b"\n")
    except OSError:  # the supervisor is gone or listens no more; this process has work all the same
        pass
    return True


def die_with_parent() -> None:
    """From here on this process is killed when its supervisor ends. Nothing without a supervisor."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before the line above
        os._exit(1)
