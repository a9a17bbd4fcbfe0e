"""Ranks for tests: rank 0 is the test's own process, the others are real processes that follow one model after another.

Run as `python -m tests.support.ranks` it is such a process: each line of its input is a model and a rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from specdec.engine.parallel.group import Bounds, Ending
from specdec.engine.parallel.rank import ModelSource, load_leader, run_follower
from specdec.engine.parallel.rank_config import RankPlace, listen
from specdec.engine.parallel.share import LeaderModel

HOST = "127.0.0.1"
PATIENT = Bounds(silence_s=60.0, exchange_s=60.0)  # tests of numbers also run beside others on busy machines


class Followers:
    """Processes that wait to be ranks 1, 2, ... of the next model."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._led: LeaderModel | None = None

    def lead(
        self, folder: Path, rank_count: int, dtype: str = "float32", positions_max: int | None = None
    ) -> LeaderModel:
        """The model of `folder` over `rank_count` ranks, led by this process; the previous model is closed."""
        self.close_model()
        self._processes = [process for process in self._processes if process.poll() is None]
        while len(self._processes) < rank_count - 1:
            command = [sys.executable, "-m", "tests.support.ranks"]
            self._processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True))
        listener = listen(HOST)
        port = listener.getsockname()[1]
        for rank, process in enumerate(self._processes[: rank_count - 1], 1):
            print(
                json.dumps([str(folder), dtype, rank, rank_count, port, positions_max]), file=process.stdin, flush=True
            )
        place = RankPlace(0, rank_count, HOST, port, listener, check_coming=self.check_running)
        ending = Ending(lambda loss: None, PATIENT, exit_grace_s=None)
        source = ModelSource(str(folder), dtype, positions_max=positions_max)
        self._led = load_leader(source, place, ending, lambda what, share: None)
        return self._led

    def check_running(self) -> None:
        """Fails when a follower has ended."""
        assert all(process.poll() is None for process in self._processes), "a follower ended"

    def close_model(self) -> None:
        """Closes the model; the processes wait for the next."""
        if self._led is not None:
            led, self._led = self._led, None
            led.close()

    def stop(self) -> None:
        """Ends the processes."""
        self.close_model()
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait(20)


def main() -> None:
    """Follows the models named on its input until the input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        folder, dtype, rank, rank_count, port, positions_max = json.loads(line)
        source = ModelSource(folder, dtype, positions_max=positions_max)
        run_follower(source, RankPlace(rank, rank_count, HOST, port), PATIENT)


if __name__ == "__main__":
    main()
