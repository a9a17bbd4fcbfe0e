"""Services as child processes: starts them, waits until they are ready, and stops them.

Used by `specdec serve` and `demo`, the bench and the tests. Children have no terminal and a process group of their own,
so a keyboard interrupt reaches only the parent, which stops them in order. Start them from the main thread: Linux ends
a child when the thread that started it ends.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from specdec.config import Settings
from specdec.errors import ConfigError
from specdec.launch.child_events import EVENTS_VARIABLE, PARENT_VARIABLE
from specdec.settings import ENVIRONMENT_PREFIX, KERNELS_VARIABLE, flag_of

POLL_S = 0.05
KILL_GRACE_S = 5.0  # beyond the drain grace of the service
LOADING_S_MAX = 3600.0  # until a service is ready: the largest models come over a network


def python_command(*arguments: str) -> list[str]:
    """Returns the command line of a Python process, which imports nothing from the folder that it is started in: a file
    random.py there, or a folder named specdec, is not part of the program."""
    return [sys.executable, "-P", *arguments]


def arguments_of(settings: Settings) -> list[str]:
    """Returns the flags that result in `settings`."""
    arguments = []
    for name, value in settings:
        if isinstance(value, bool):
            arguments.append(flag_of(name) if value else flag_of(f"no_{name}"))
        elif isinstance(value, tuple):
            arguments += [f"{flag_of(name)}={entry}" for entry in value]
        elif value is not None:
            arguments.append(f"{flag_of(name)}={value}")
    return arguments


class Child:
    """One `specdec COMMAND` process. Use it in a `with` statement or call `stop`; both are idempotent."""

    def __init__(
        self,
        command: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        stderr: int | IO[Any] | None = None,
        files: Sequence[int] = (),
    ) -> None:
        """Starts it. `environment` is added to this process's own without the variables of settings; `stderr` as for
        Popen; `files`: open descriptors that it inherits."""
        self.command = command
        self.address = ""
        self._unread = b""
        self._is_requested = False
        self._late_s = time.monotonic() + LOADING_S_MAX
        self._events, writing = os.pipe()
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name == KERNELS_VARIABLE or not name.startswith(ENVIRONMENT_PREFIX)
        }
        own = {EVENTS_VARIABLE: str(writing), PARENT_VARIABLE: str(os.getpid())}
        try:
            self.process = subprocess.Popen(
                python_command("-m", "specdec.cli", command, *arguments),
                env={**inherited, **(environment or {}), **own},
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=(writing, *files),
                start_new_session=True,
            )
        finally:
            os.close(writing)

    def __repr__(self) -> str:
        code = self.process.poll()
        return f"Child({self.command}, pid {self.process.pid}, {'running' if code is None else f'ended with {code}'})"

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def memory_peak_bytes(self) -> int:
        """The most memory that the process has had resident at once, weights read from files included; 0 once it has
        ended."""
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8").splitlines()
        except OSError:
            return 0
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

    def wait_ready(self, timeout_s: float = 120.0) -> str:
        """Returns its address once it serves. Raises ConfigError with its own message when it ends or is late."""
        wait_all_ready([self], timeout_s)
        return self.address

    def check_ready(self, timeout_s: float) -> bool:
        """Whether it serves; waits up to `timeout_s`. Raises ConfigError with its own message when it has ended; one
        that is not ready LOADING_S_MAX after its start is ended."""
        deadline_s = time.monotonic() + timeout_s
        while not self.address:
            event = self._next_event(deadline_s)
            if event is None and self.is_running:
                if time.monotonic() < self._late_s:
                    return False
                self.process.kill()
                raise ConfigError(f"the {self.command} service was not ready within {LOADING_S_MAX:g} s and is ended")
            if event is None or event["event"] == "failed":
                code = self.process.wait()
                ended = f"the {self.command} service ended with code {code} before it was ready"
                raise ConfigError(event["message"] if event else ended)
            if event["event"] == "ready":
                self.address = event["address"]
        return True

    def _next_event(self, deadline_s: float) -> dict[str, Any] | None:
        """Returns the next event; None after the deadline or the end of the process."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._events, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    return None
                data = os.read(self._events, 65536)
                if not data:
                    self.process.wait()  # the pipe closes with the process
                    return None
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        return event

    def signal(self, number: int) -> None:
        """Sends a signal to a running process: SIGSTOP freezes it, SIGKILL simulates a crash."""
        self.process.send_signal(number)

    def request_stop(self) -> None:
        """Sends SIGTERM once; a frozen process receives it too."""
        if self.is_running and not self._is_requested:
            self._is_requested = True
            self.process.terminate()
            self.process.send_signal(signal.SIGCONT)

    def stop(self, grace_s: float = KILL_GRACE_S) -> int:
        """Sends SIGTERM, after `grace_s` SIGKILL; returns the exit code. Also ends a frozen process."""
        if self.is_running:
            self.request_stop()
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait()
        if self._events >= 0:
            os.close(self._events)
            self._events = -1
        return code


def start(command: str, settings: Settings, stderr: int | IO[Any] | None = None) -> Child:
    """Starts the service with these settings; `wait_ready` returns its address."""
    return Child(command, arguments_of(settings), stderr=stderr)


def wait_all_ready(children: Sequence[Child], timeout_s: float = 120.0) -> None:
    """Returns when all serve. Raises ConfigError when one has ended, with its own message, or after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while waiting := [child.command for child in children if not child.check_ready(POLL_S)]:
        if time.monotonic() > deadline_s:
            raise ConfigError(f"not ready within {timeout_s:g} s: {', '.join(waiting)}")


def stop_all(children: Iterable[Child], grace_s: float = KILL_GRACE_S) -> None:
    """Stops the first, which uses the others, then the others together; kills all when interrupted."""
    ordered = list(children)
    try:
        for child in ordered[:1]:
            child.stop(grace_s)
        for child in ordered[1:]:
            child.request_stop()
        for child in ordered[1:]:
            child.stop(grace_s)
    finally:
        for child in ordered:
            child.stop(0.0)
