"""The standard streams of a command: always open, and never the reason that a service ends.

A service has other work than its sentences for people, so `say` gives up a line that the stream does not take. A
command whose work is its output, such as `generate`, prints as usual and ends when it cannot (`is_of_output`).
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import TextIO

from specdec.terminal import printable, printable_line

PATIENCE_S = 1.0  # for a reader of the stream; then the line is given up
PIECE_BYTES_MAX = 4096  # a pipe that can be written to takes this many at once
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def prepare() -> None:
    """Opens standard streams that are closed on the null device, so that no socket gets their number, and has output
    replace characters that its encoding lacks. Call it before anything else is opened."""
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the least free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", errors="replace", closefd=False))
        stream = getattr(sys, name)
        if mode == "w" and isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def warn(sentence: str) -> None:
    """Prints a sentence for the user on standard error, on one line that begins with the command's name, as `say`
    does."""
    say(f"specdec: {printable_line(' '.join(sentence.split()))}", is_error=True)


def say(line: str, is_error: bool = False) -> None:
    """Prints a line on standard output or standard error, its control characters shown. Never raises; a line that the
    stream does not take within PATIENCE_S is lost."""
    stream: TextIO | None = sys.stderr if is_error else sys.stdout
    if stream is None:  # closed, in a process that is not a command's
        return
    try:
        stream.flush()  # what was printed before comes before
        number = stream.fileno()
        data = f"{printable(line)}\n".encode(stream.encoding, "replace")
        for start in range(0, len(data), PIECE_BYTES_MAX):
            ready = select.poll()
            ready.register(number, select.POLLOUT)
            if ready.poll(1000 * PATIENCE_S):
                os.write(number, data[start : start + PIECE_BYTES_MAX])
    except io.UnsupportedOperation:  # a stream in memory
        print(printable(line), file=stream)
    except (OSError, ValueError):  # full, without a reader, or closed
        pass


def is_of_output(error: OSError) -> bool:
    """Whether this is the failure to write to an open file, as that of `print` is."""
    return error.filename is None and error.errno in _OUTPUT_ERRORS


def give_up() -> None:
    """Sends what is still to be written to the null device: Python writes it at the end of the process, and would fail
    again."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(null, stream.fileno())
    os.close(null)
