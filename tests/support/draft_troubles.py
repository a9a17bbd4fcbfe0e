"""A running draft service in trouble, until an event is set: a caller runs this in a thread of its own, and sends
SIGCONT afterwards."""

from __future__ import annotations

import signal
import threading

from specdec.launch.children import Child

AWAKE_S, ASLEEP_S = 0.002, 0.2  # one step in a hundred times as long


def silent(draft: Child, is_over: threading.Event) -> None:
    """The draft does nothing at all, and its connections stay open."""
    draft.signal(signal.SIGSTOP)
    is_over.wait()


def hundred_times_slower(draft: Child, is_over: threading.Event) -> None:
    """The draft runs for two milliseconds in two hundred."""
    while not is_over.wait(AWAKE_S):
        draft.signal(signal.SIGSTOP)
        is_over.wait(ASLEEP_S)
        draft.signal(signal.SIGCONT)
