"""The process in which stages run, and its parent's end of it.

A stage may hang on a device, or leave it unusable. So stages run in a process of their own, which sends each row of
results as it is found; one that is over its time is killed with all processes it has started. Stages that end well
share one process, and the models loaded in it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from bench.gpu_session.stages import Stage

if TYPE_CHECKING:
    import torch

Row = dict[str, Any]
STOP_S = 10.0  # a process without work ends within this


class Session:
    """What a stage is given. `is_small`: tiny shapes on a CPU, in Triton's interpreter; times mean nothing."""

    def __init__(self, device: torch.device, is_small: bool, send: Callable[[str, Any], None]):
        self.device = device
        self.is_small = is_small
        self._send = send

    @property
    def rounds(self) -> int:
        """How often a step is timed."""
        return 2 if self.is_small else 30

    def add(self, **row: Any) -> None:
        """Reports one row of results, which counts whatever becomes of the stage."""
        self._send("row", row)


class Lines(logging.Handler):
    """Sends what the engine logs: a kernel that is not used is named there."""

    def __init__(self, send: Callable[[str, Any], None]):
        super().__init__(logging.INFO)
        self._send_line = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send_line("log", record.getMessage())


def serve(pipe: Connection, is_small: bool) -> None:
    """Runs the stages whose names come through the pipe, until it is closed."""
    os.setpgrp()  # what a stage starts ends with it
    try:
        session = begun(pipe, is_small)
    except Exception as error:
        pipe.send(("end", reason_of(error)))
        return
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        try:
            importlib.import_module(f"bench.gpu_session.{name}").run(session)
            pipe.send(("end", None))
        except Exception as error:
            traceback.print_exc()
            pipe.send(("end", reason_of(error)))


def begun(pipe: Connection, is_small: bool) -> Session:
    """Loads what all stages need, and sends what the session measures."""
    import torch

    from bench.gpu_session.card import facts_of
    from specdec.engine.loading.devices import find_device

    if is_small:
        torch.set_num_threads(1)
    device = find_device("cpu" if is_small else "cuda")
    session = Session(device, is_small, lambda kind, content: pipe.send((kind, content)))
    logger = logging.getLogger("specdec.engine")
    logger.addHandler(Lines(lambda kind, content: pipe.send((kind, content))))
    logger.setLevel(logging.INFO)
    pipe.send(("facts", facts_of(device)))
    return session


def reason_of(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    return f"{type(error).__name__}: {lines[0]}"


class Worker:
    """A process that runs stages, one at a time."""

    def __init__(self, is_small: bool):
        context = multiprocessing.get_context("spawn")
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(target=serve, args=(its_end, is_small))
        self._process.start()
        its_end.close()

    def run(self, stage: Stage, limit_s: float, heard: Callable[[str, Any], None]) -> str | None:
        """Runs a stage for at most `limit_s` seconds; calls `heard(kind, content)` for each `row`, `log` and `facts`.

        Returns None for a stage that came to its end, else the reason; then the process is of no more use.
        """
        until_s = time.monotonic() + limit_s
        try:
            self._pipe.send(stage.name)
            while self._pipe.poll(max(0.0, until_s - time.monotonic())):
                kind, content = self._pipe.recv()
                if kind == "end":
                    reason: str | None = content
                    return reason
                heard(kind, content)
        except (EOFError, OSError):
            self._process.join(STOP_S)
            return f"its process ended with {self._process.exitcode}"
        return f"not done after {limit_s:.0f} s"

    def stop(self, is_idle: bool) -> None:
        """Ends the process: by itself if it `is_idle`. What stages have started and left ends too."""
        self._pipe.close()
        self._process.join(STOP_S if is_idle else 0)
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # no process of its group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
