"""llama.cpp beside ours: its environment, its server as a process of its own, and one completion.

The environment is made in the cache folder at its first use, by pip from the configured index, and holds one pinned
package. Nothing of it is imported here.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError
from specdec.folders import cache_folder

PACKAGE = "xllamacpp==2026.10.11549"
SERVER = Path(__file__).resolve().parent / "llama_server.py"
POSITIONS = 2048
INSTALLED_S_MAX, STOPPED_S_MAX, ANSWERED_S_MAX = 600.0, 10.0, 600.0
SETTLE_S = 0.25  # its threads spin for a while after their last work
# The fastest sampler that takes the likeliest token: others of its chain would only cost it time.
GREEDY = {"samplers": ["top_k"], "top_k": 1, "temperature": 0.0}


@dataclass(frozen=True, slots=True)
class Timed:
    """One generation: the seconds of the whole request, by the client's clock, and its tokens."""

    seconds: float
    token_ids: tuple[int, ...]

    @property
    def tokens_per_s(self) -> float:
        return len(self.token_ids) / self.seconds


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """A running server; `system`: what it says it uses of the processor."""

    address: str
    system: str

    def complete(self, prompt_ids: Sequence[int], token_count: int) -> Timed:
        """Exactly `token_count` greedy tokens, the whole request timed. Raises OSError where it does not answer."""
        asked: dict[str, Any] = {"prompt": list(prompt_ids), "n_predict": token_count, "ignore_eos": True}
        asked |= {"cache_prompt": False, "return_tokens": True, **GREEDY}
        body = json.dumps(asked).encode()
        request = urllib.request.Request(f"{self.address}/completion", body, {"Content-Type": "application/json"})
        began_s = time.perf_counter()
        with urllib.request.urlopen(request, timeout=ANSWERED_S_MAX) as response:
            answer = json.load(response)
        took_s = time.perf_counter() - began_s
        time.sleep(SETTLE_S)
        return Timed(took_s, tuple(answer["tokens"]))


def environment() -> Path:
    """Returns the Python of llama.cpp's environment, which is made at the first call (half a minute).

    Raises ConfigError with pip's last line where the package cannot be installed.
    """
    folder = cache_folder() / "bench" / PACKAGE.replace("==", "-")
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.is_file():
        return python
    venv.create(folder, clear=True, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--only-binary", ":all:", PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALLED_S_MAX)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{PACKAGE} was not installed within {INSTALLED_S_MAX:g} s") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"])[-1]
        raise ConfigError(f"{PACKAGE} cannot be installed: {said}")
    complete.touch()
    return python


@contextlib.contextmanager
def llama_server(python: Path, model: Path, threads: int) -> Iterator[LlamaServer]:
    """Serves a GGUF file on a free port of loopback, and ends with the `with` statement or this process.

    Raises ConfigError where it does not start.
    """
    command = [str(python), str(SERVER), str(model), str(threads), str(POSITIONS)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("{"):
                yield LlamaServer(**json.loads(line))
                break
        else:
            raise ConfigError(f"{' '.join(command)} ended with {process.wait()} before it was ready")
    finally:
        process.stdin.close()
        try:
            process.wait(STOPPED_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
