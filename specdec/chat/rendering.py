"""The process that renders a template (`specdec.chat.renderer`): its start, its questions, its end.

It costs a tenth of a second once, and less than a millisecond a rendering; what a template does in it, within its
bounds, it can do to itself only.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from specdec.errors import ConfigError, ModelRefused

SECONDS_MAX = 10.0  # of a rendering, which takes milliseconds
MEMORY_BYTES_MAX = 256 << 20  # beside the interpreter and jinja
CHARACTERS_MAX = 1 << 22  # of a prompt: a request has at most as many bytes


class RenderingProcess:
    """Renders one template, for one thread at a time; one that was ended is started again, and none outlives this
    object.

    `name`: what errors call the template; `variables`: the names that it looks up. Making it raises ModelRefused for
    one that is not valid, ConfigError without jinja2.
    """

    def __init__(self, source: str, name: str) -> None:
        self._source, self._name = source, name
        self._running: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self.variables: frozenset[str] = frozenset()
        if importlib.util.find_spec("jinja2") is None:
            raise ConfigError("chat templates need jinja2: pip install jinja2")
        self._start()

    def render(self, variables: Mapping[str, Any], now: str) -> str:
        """Returns the text; `now`: the time that the template may say, in ISO 8601. Raises ConfigError for a refusal,
        ModelRefused for a fault of the template."""
        with self._turn:
            if self._running is None:
                self._start()
            answer = self._answer({"variables": variables, "now": now})
        if "refusal" in answer:
            raise ConfigError(f"{self._name} refuses these messages: {answer['refusal']}")
        if "fault" in answer:
            raise ModelRefused(f"{self._name} is at fault: {answer['fault']}")
        text: str = answer["text"]
        return text

    def _start(self) -> None:
        self._running = subprocess.Popen(
            [sys.executable, "-P", "-m", "specdec.chat.renderer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._end = weakref.finalize(self, end, self._running)
        bounds = {"seconds": SECONDS_MAX, "memory_bytes": MEMORY_BYTES_MAX, "characters": CHARACTERS_MAX}
        answer = self._answer({"source": self._source, "bounds": bounds})
        if "fault" in answer:
            raise ModelRefused(f"{self._name} is not valid: {answer['fault']}")
        self.variables = frozenset(answer["variables"])

    def _answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a question. Ends the process if there is none, or if the wait for it is broken off."""
        running, line = self._running, b""
        assert running is not None and running.stdin is not None and running.stdout is not None
        try:
            running.stdin.write(json.dumps(question).encode() + b"\n")
            running.stdin.flush()
            line = running.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            if not line.endswith(b"\n"):
                self._running = None
                self._end()
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        if running.returncode == -signal.SIGALRM:
            return {"fault": f"it takes more than {SECONDS_MAX:g} s"}
        return {"fault": f"it ends its process, with code {running.returncode}"}


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and closes its pipes."""
    process.kill()
    process.stdout and process.stdout.close()
    process.communicate()
