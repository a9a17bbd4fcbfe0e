"""`python -m bench.tensor_parallel`: an engine step and the memory of a rank, by the number of ranks.

One rank with one thread, one with two, and two with one thread each live side by side and take turns of ten steps;
those that wait sleep. Memory is the peak of the fullest rank by the kernel, less that of a rank of a tiny model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.bars import Bar, worst_of
from bench.results import Cell, Results, Table, shown
from bench.runner import Contender, Prepared, Values, main
from tests.support.rank_processes import HEADS, SHAPE, TINY_SHAPE, Ranks, Variant, measure_memory, running, write_model

ONE, TWO_THREADS, TWO_RANKS = Variant(1, 1), Variant(1, 2), Variant(2, 1)
VARIANTS = (ONE, TWO_THREADS, TWO_RANKS)
SHAPES = ((1, 1), (1, 5), (1, 8), (8, 5))  # sequences, rows of each
RANK_COUNTS = (1, 2, 4)  # whose memory is measured
STEPS = 10  # of a turn
OF_ONE, STRETCH = 0.7, 0.6  # a step of two ranks over one's, at most


class TensorParallel:
    """See the module."""

    name = "tensor_parallel"
    about = "a step of 82 million weights in bfloat16 after 256 tokens, by ranks and threads, and a rank's memory"
    turns, quick_turns, minutes = 9, 2, 3

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        pass

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        return [{"sequences": sequences, "rows": rows} for sequences, rows in (SHAPES[:2] if asked.quick else SHAPES)]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        with TemporaryDirectory() as scratch:
            folder = write_model(Path(scratch) / "model", SHAPE | HEADS, torch.bfloat16)
            tiny_folder = write_model(Path(scratch) / "tiny", TINY_SHAPE | HEADS, torch.bfloat16)
            memory = measure_memory(folder, tiny_folder, RANK_COUNTS[:2] if asked.quick else RANK_COUNTS)
            with running(folder, VARIANTS) as started:

                def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
                    results.notes["mib"] = {own.variant: [own.peak_mib, own.model_mib] for own in memory}
                    shape = int(cell["sequences"]), int(cell["rows"])
                    return {ranks.variant.name: partial(self._step_ms, ranks, shape) for ranks in started}

                yield contenders

    def _step_ms(self, ranks: Ranks, shape: tuple[int, int], turn: int) -> Values:
        return {"ms": statistics.median(ranks.time_steps(*shape, STEPS)) * 1e3}

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for cell in results.cells():
            times = (shown(results.median(cell, own.name, "ms")) for own in VARIANTS)
            ratio = results.ratio(cell, TWO_RANKS.name, ONE.name, "ms")
            told = ratio.short(OF_ONE, is_limit=True) if ratio else ""
            rows.append([f"{cell['sequences']} × {cell['rows']}", *times, told])
        columns = ["sequences × rows, ms", *(own.name for own in VARIANTS), f"2 ranks / 1 (bar {OF_ONE})"]
        memory = [[name, *map(shown, sizes)] for name, sizes in results.notes.get("mib", {}).items()]
        return [
            Table("steps", self.about, columns, rows),
            Table("memory", "peak memory of the fullest rank, MiB", ["", "in all", "of the model"], memory),
        ]

    def bars(self, results: Results) -> Sequence[Bar]:
        found = {
            f"{cell['sequences']} × {cell['rows']}": results.ratio(cell, TWO_RANKS.name, ONE.name, "ms")
            for cell in results.cells()
        }
        ratios = {name: ratio.median for name, ratio in found.items() if ratio}
        return [worst_of("a step of two ranks / of one, one thread each", OF_ONE, ratios, True, STRETCH)]


BENCHMARK = TensorParallel()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
