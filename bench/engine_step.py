"""`python -m bench.engine_step`: time of one engine step on the embedded pair, and what neighbour-independence costs.

Each shape is run twice, interleaved: at the measured row widths, and as the library likes it, unpadded, where a row's
last bits depend on the others. The difference is what the promise costs; the code is the same. Beside the forwards
stands what a step takes outside them: scheduling, preparing the cache, handing results back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.harness import DRAFT_MODEL, TARGET_MODEL
from specdec.engine.interface import CausalModel, RaggedBatch, Segment
from specdec.engine.kv_cache import KVCache
from specdec.engine.model import load_model
from specdec.engine.row_widths import RowWidths
from specdec.engine.scheduler import Engine, Feed, StepTiming
from specdec.engine.transformers_model import TransformersModel

CACHED_COUNT = 256  # tokens before the step
BLOCK_SIZE, BLOCK_COUNT = 64, 64
UNPADDED = RowWidths(tuple(range(1, 129)), row_multiple=1)
ANY_TILE = tuple(range(1, 65))
SHAPES = (  # model, sequences, rows each
    ("target", 1, 1),
    ("target", 1, 5),
    ("target", 1, 8),
    ("target", 8, 5),
    ("draft", 1, 1),
)


@dataclass(frozen=True, slots=True)
class StepFigure:
    """Medians in milliseconds of one shape; `independence_cost` is padded / unpadded."""

    model: str
    dtype: str
    sequence_count: int
    row_count: int
    step_ms: float
    unpadded_ms: float
    independence_cost: float


@dataclass(frozen=True, slots=True)
class OverheadFigure:
    """Median milliseconds a step takes beyond its forward and evidence, in the engine's thread."""

    model: str
    dtype: str
    sequence_count: int
    overhead_ms: float


def batch_of(cache: KVCache, model: CausalModel, sequence_count: int, row_count: int) -> RaggedBatch:
    """Sequences with CACHED_COUNT tokens cached, each with `row_count` more to run with all their logits."""
    generator = torch.Generator().manual_seed(0)
    segments = []
    for _ in range(sequence_count):
        token_ids = torch.randint(
            1, model.description.vocabulary_size, (CACHED_COUNT + row_count,), generator=generator
        )
        ids = token_ids.tolist()
        table = cache.reserve(CACHED_COUNT + row_count)
        model.forward(RaggedBatch((Segment(table.block_ids, 0, ids[:CACHED_COUNT], 0),)))
        segments.append(Segment(table.block_ids, CACHED_COUNT, ids[CACHED_COUNT:], row_count))
    return RaggedBatch(tuple(segments))


def time_step(model: TransformersModel, batch: RaggedBatch) -> float:
    started_s = time.perf_counter()
    model.forward(batch)
    return (time.perf_counter() - started_s) * 1e3


def measure_shape(model: TransformersModel, name: str, sequence_count: int, row_count: int, repeats: int) -> StepFigure:
    """Blocks of steps at the measured widths and unpadded, in turn: A B A B."""
    cache = KVCache(BLOCK_COUNT, BLOCK_SIZE, model.allocate(BLOCK_COUNT, BLOCK_SIZE))
    batch = batch_of(cache, model, sequence_count, row_count)
    measured = model.families
    padded: list[float] = []
    unpadded: list[float] = []
    for _ in range(repeats):
        model.use_families(*measured)
        model.forward(batch)
        padded += [time_step(model, batch) for _ in range(10)]
        model.use_families(UNPADDED, ANY_TILE)
        model.forward(batch)
        unpadded += [time_step(model, batch) for _ in range(10)]
    model.use_families(*measured)
    step_ms, unpadded_ms = statistics.median(padded), statistics.median(unpadded)
    dtype = model.description.dtype
    return StepFigure(name, dtype, sequence_count, row_count, step_ms, unpadded_ms, step_ms / unpadded_ms)


def measure_overhead(model: TransformersModel, name: str, sequence_count: int, step_count: int) -> OverheadFigure:
    """Decodes in the engine's own thread: time from step to step, less forward and evidence."""
    engine = Engine(model, BLOCK_COUNT, BLOCK_SIZE, lambda payloads, row_counts, logits: payloads)
    overheads: list[float] = []
    finished = threading.Event()
    last_s = 0.0

    def submit(table, token_id: int) -> None:
        engine.submit(Feed(table, table.length, (token_id,), 1, table, step_done, failed=print))

    def step_done(table: object, timing: StepTiming) -> None:
        nonlocal last_s
        if table is tables[0]:
            started_s, last_s = last_s, time.perf_counter()
            overheads.append((last_s - started_s - timing.forward_s - timing.evidence_s) * 1e3)
        if len(overheads) > step_count:
            finished.set()
        else:
            submit(table, 1)

    engine.start()
    tables = [engine.cache.reserve(step_count + 2) for _ in range(sequence_count)]
    engine.post(lambda: [submit(table, 1) for table in tables])
    finished.wait()
    engine.stop()
    return OverheadFigure(name, model.description.dtype, sequence_count, statistics.median(overheads[1:]))


def show(steps: list[StepFigure], overheads: list[OverheadFigure], console: Console) -> None:
    table = Table(title=f"One step, {CACHED_COUNT} tokens cached (medians, ms)")
    for column in ("model", "dtype", "sequences × rows", "step", "unpadded", "independence costs"):
        table.add_column(column, justify="left" if column in ("model", "dtype") else "right")
    for step in steps:
        shape = f"{step.sequence_count} × {step.row_count}"
        cost = f"{step.step_ms - step.unpadded_ms:+.2f} (× {step.independence_cost:.2f})"
        table.add_row(step.model, step.dtype, shape, f"{step.step_ms:.2f}", f"{step.unpadded_ms:.2f}", cost)
    console.print(table)
    table = Table(title="A decoding step beyond forward and evidence (medians, ms)")
    for column in ("model", "dtype", "sequences", "overhead"):
        table.add_column(column, justify="left" if column in ("model", "dtype") else "right")
    for figure in overheads:
        table.add_row(figure.model, figure.dtype, str(figure.sequence_count), f"{figure.overhead_ms:.3f}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32,bfloat16", help="types, comma separated (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="interleaved blocks of ten steps (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("out/engine_step.json"), help="file (default: %(default)s)")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    steps: list[StepFigure] = []
    overheads: list[OverheadFigure] = []
    for dtype in asked.dtype.split(","):
        for name, folder in (("target", TARGET_MODEL), ("draft", DRAFT_MODEL)):
            model = load_model(str(folder), dtype)
            if not isinstance(model, TransformersModel):
                raise TypeError(f"{folder} is no transformers model")
            shapes = [shape[1:] for shape in SHAPES if shape[0] == name]
            steps += [measure_shape(model, name, *shape, asked.repeats) for shape in shapes]
            overheads += [measure_overhead(model, name, count, 100) for count in (1, 8)]
    show(steps, overheads, Console())
    hardware = {"threads": asked.threads, "cpu": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    figures = {"hardware": hardware, "steps": [asdict(s) for s in steps], "overheads": [asdict(o) for o in overheads]}
    asked.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
