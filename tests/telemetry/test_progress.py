"""Progress bars: shown on a terminal by a foreground process only."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

PROGRAM = """
import os, sys
from specdec.telemetry.progress import loading_bar
with loading_bar("target model") as progress:
    progress("loading weights", 0.5)
"""


def shown(in_front: bool) -> str:
    """Returns the program's output to a real terminal, as its foreground process or as a supervised child."""
    parent, child = pty.openpty()
    prepare = "import fcntl, termios; os.setsid(); fcntl.ioctl(2, termios.TIOCSCTTY, 0);" if in_front else ""
    code = f"import os; {prepare}\n{PROGRAM}"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=child, start_new_session=not in_front)
    process.wait(20)
    os.close(child)
    text = b""
    try:
        while data := os.read(parent, 65536):
            text += data
    except OSError:  # the terminal is gone with its last user
        pass
    os.close(parent)
    return text.decode()


def test_a_bar_is_shown_in_front_only():
    """Claim: a person sees the bar; a child of a supervisor that shares its terminal draws none over it."""
    assert "target model" in shown(in_front=True)
    assert shown(in_front=False) == ""
