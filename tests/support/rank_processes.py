"""Ranks as processes of their own, of a model with random weights: steps of theirs, and the memory that each takes.

Neither depends on what the weights say. Run as `python -m tests.support.rank_processes` it is such a process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from specdec.engine.cache.kv_cache import KVCache
from specdec.engine.interface import CausalModel, Chunk, RaggedBatch
from specdec.engine.loading.model import load_model
from specdec.engine.parallel.group import Ending
from specdec.engine.parallel.rank import ModelSource, load_leader, run_follower
from specdec.engine.parallel.rank_config import RankPlace, listen
from tests.support.harness import TARGET_MODEL
from tests.support.processes import module_command

SHAPE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 11}  # 82 million weights
TINY_SHAPE = {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4}
VOCABULARY_SIZE, POSITIONS_MAX = 8192, 1024
ROW_COUNTS = (1, 5, 8)
SEQUENCE_COUNTS = (1, 8)
CACHED_COUNT = 256  # tokens before the step
BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class Variant:
    """Ranks and threads of each."""

    rank_count: int
    thread_count: int

    @property
    def name(self) -> str:
        ranks = "1 rank" if self.rank_count == 1 else f"{self.rank_count} ranks"
        return f"{ranks}, {self.thread_count} thread{'s' if self.thread_count > 1 else ''}"


@dataclass(frozen=True, slots=True)
class MemoryMeasurement:
    """The peak memory of the fullest rank, in MiB, and without that of a tiny model."""

    variant: str
    peak_mib: float
    model_mib: float


def write_model(folder: Path, shape: dict[str, Any], dtype: torch.dtype) -> Path:
    """A Llama of random weights with the shipped tokenizer."""
    config = transformers.LlamaConfig(
        **shape, vocab_size=VOCABULARY_SIZE, max_position_embeddings=POSITIONS_MAX, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.to(dtype)  # type: ignore[arg-type]  # a wrapper of transformers hides the types of `to`
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((TARGET_MODEL / "tokenizer.json").read_bytes())
    return folder


def block_count() -> int:
    """Blocks of the cache, the zero block included: all sequences side by side."""
    return 1 + max(SEQUENCE_COUNTS) * -(-(CACHED_COUNT + max(ROW_COUNTS)) // BLOCK_SIZE)


def cache_bytes() -> int:
    """Bytes of the cache of SHAPE in float32, all ranks together."""
    head_size = SHAPE["hidden_size"] // HEADS["num_attention_heads"]
    return 2 * 4 * SHAPE["num_hidden_layers"] * HEADS["num_key_value_heads"] * head_size * block_count() * BLOCK_SIZE


class Texts:
    """Cached texts, and steps that run the same rows after them again and again."""

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self._cache = KVCache(block_count(), BLOCK_SIZE, model.allocate(block_count(), BLOCK_SIZE))
        self._tables = [self._cache.reserve(CACHED_COUNT + max(ROW_COUNTS)) for _ in range(max(SEQUENCE_COUNTS))]
        self._ids = torch.randint(1, 4096, (CACHED_COUNT + max(ROW_COUNTS),)).tolist()
        for table in self._tables:
            model.forward(RaggedBatch((Chunk(table.block_ids, 0, self._ids[:CACHED_COUNT], 0),)))

    def time_steps(self, sequence_count: int, row_count: int, step_count: int) -> list[float]:
        """Seconds of each step, after one that is not counted."""
        ids = self._ids[CACHED_COUNT : CACHED_COUNT + row_count]
        tables = self._tables[:sequence_count]
        batch = RaggedBatch(tuple(Chunk(table.block_ids, CACHED_COUNT, ids, row_count) for table in tables))
        times = []
        for _ in range(step_count + 1):
            started_s = time.perf_counter()
            self.model.forward(batch)
            times.append(time.perf_counter() - started_s)
        return times[1:]


def work(folder: str, rank: int, rank_count: int, port: int, threads: int) -> None:
    """One rank process: rank 0 reads "sequences rows steps" lines and answers with times; the others follow."""
    torch.set_num_threads(threads)
    sys.setswitchinterval(0.0005)
    source = ModelSource(folder)
    if rank:
        run_follower(source, RankPlace(rank, rank_count, "127.0.0.1", port))
        return
    close: Callable[[], None] = lambda: None  # noqa: E731
    if rank_count == 1:
        model: CausalModel = load_model(folder)
    else:
        listener = listen("127.0.0.1")
        print(json.dumps(listener.getsockname()[1]), flush=True)
        place = RankPlace(0, rank_count, "127.0.0.1", listener.getsockname()[1], listener)
        model = leader = load_leader(source, place, Ending(lambda loss: None), lambda what, share: None)
        close = leader.close
    texts = Texts(model)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(texts.time_steps(*map(int, line.split()))), flush=True)
    close()


class Ranks:
    """One variant's processes."""

    def __init__(self, folder: Path, variant: Variant) -> None:
        self.variant = variant
        self._folder = folder
        self._processes: list[subprocess.Popen[str]] = [self._start(0, 0)]
        if variant.rank_count > 1:
            port = self._answer()
            self._processes += [self._start(rank, port) for rank in range(1, variant.rank_count)]
        self._answer()

    def _start(self, rank: int, port: int) -> subprocess.Popen[str]:
        numbers = map(str, (rank, self.variant.rank_count, port, self.variant.thread_count))
        command = module_command("tests.support.rank_processes", str(self._folder), *numbers)
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _answer(self) -> Any:
        pipe = self._processes[0].stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            raise RuntimeError(f"{self.variant.name}: rank 0 ended")
        return json.loads(line)

    def time_steps(self, sequence_count: int, row_count: int, step_count: int) -> list[float]:
        """Seconds of each step."""
        rank_0 = self._processes[0]
        print(sequence_count, row_count, step_count, file=rank_0.stdin, flush=True)
        times_s: list[float] = self._answer()
        return times_s

    @property
    def peak_bytes(self) -> int:
        """The most memory the fullest rank ever had."""
        return max(_peak_bytes(process.pid) for process in self._processes)

    def stop(self) -> None:
        pipe = self._processes[0].stdin
        assert pipe is not None
        pipe.close()
        for process in self._processes:
            process.wait(20)


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@contextmanager
def running(folder: Path, variants: Sequence[Variant]) -> Iterator[list[Ranks]]:
    """The variants' processes, all ready; stopped at the end."""
    started: list[Ranks] = []
    try:
        for variant in variants:
            started.append(Ranks(folder, variant))
        yield started
    finally:
        for ranks in started:
            ranks.stop()


def measure_memory(folder: Path, tiny_folder: Path, rank_counts: Sequence[int]) -> list[MemoryMeasurement]:
    """One variant after another, each alone."""
    measurements = []
    for rank_count in rank_counts:
        variant = Variant(rank_count, 1)
        peaks = []
        for each in (folder, tiny_folder):
            with running(each, [variant]) as (ranks,):
                peaks.append(ranks.peak_bytes / 2**20)
        measurements.append(MemoryMeasurement(variant.name, peaks[0], peaks[0] - peaks[1]))
    return measurements


if __name__ == "__main__":
    work(sys.argv[1], *map(int, sys.argv[2:]))
