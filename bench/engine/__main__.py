"""`python -m bench.engine`: the engine's step by rows, sequences and context, its streams and its sampler.

One process, no services. For the shipped pair and the deepened target (bench/deepened.py): time of a step and its ratio
to the memory limit, its products beside torch's, plain decoding of many streams with the time outside the forward pass,
and sampler and noise by vocabulary. Prints tables and the bar, writes JSON and a picture.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from bench import deepened, plot
from bench.bars import Bar, add_check_flag, as_json, conclude, worst_of
from bench.engine import tables
from bench.engine.bandwidth import LARGE_BYTES, Reader
from bench.engine.picture import picture
from bench.engine.products import ProductMeasurement, measure_products
from bench.engine.sampler import VOCABULARIES, SamplerMeasurement, measure_sampler
from bench.engine.steps import (
    CONTEXTS,
    ROWS,
    SEQUENCES,
    StepMeasurement,
    measure_steps,
    shapes_of,
)
from bench.engine.streams import STREAMS, StreamMeasurement, measure_streams
from specdec.engine.cpu.backend import CpuBackend
from specdec.errors import SpecdecError
from tests.support.harness import DRAFT_MODEL, TARGET_MODEL

MODELS = ("deepened", "target", "draft")
QUICK = {
    "models": ["deepened"],
    "sequences": [1, 4, 16],
    "contexts": [64, 256],
    "vocabularies": [4096, 128256],
    "rounds": 3,
    "tokens": 24,
}


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(%(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="(%(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="of one sequence (%(default)s)")
    parser.add_argument("--sequences", type=int, nargs="+", default=list(SEQUENCES), help="of a step (%(default)s)")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), help="cached tokens (%(default)s)")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS), help="decoding at once (%(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="of a stream in a block (%(default)s)")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=list(VOCABULARIES), help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (%(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="each measures every shape once (%(default)s)")
    parser.add_argument(
        "--extra-layers", type=int, default=deepened.EXTRA_LAYERS_DEFAULT, help="of the deepened target"
    )
    parser.add_argument("--quick", action="store_true", help="about two minutes: one model, few shapes, few rounds")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of JSON and picture (%(default)s)")
    add_check_flag(parser)
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args(arguments)


@contextlib.contextmanager
def folders(extra_layers: int) -> Iterator[dict[str, Path]]:
    """The models by name; the deepened one is written for the time being."""
    with tempfile.TemporaryDirectory() as scratch:
        deep = deepened.write_deepened(Path(scratch) / "deepened", extra_layers)
        yield {"deepened": deep, "target": TARGET_MODEL, "draft": DRAFT_MODEL}


def measure(
    asked: argparse.Namespace, advance: Callable[[str], None]
) -> tuple[list[StepMeasurement], list[ProductMeasurement], list[StreamMeasurement], list[SamplerMeasurement]]:
    """Runs all requested measurements; `advance` is called with the name of each finished part."""
    steps: list[StepMeasurement] = []
    products: list[ProductMeasurement] = []
    streams: list[StreamMeasurement] = []
    shapes = shapes_of(asked.rows, asked.sequences, asked.contexts)
    with folders(asked.extra_layers) as found:
        for name in asked.models:
            for dtype in asked.dtypes:
                model = deepened.load(found[name], dtype)
                steps += measure_steps(model, name, shapes, asked.rounds, lambda: advance("steps"))
                assert isinstance(model.backend, CpuBackend)
                products += measure_products(
                    name, model.backend.product_shapes, getattr(torch, dtype), asked.rounds, lambda: advance("products")
                )
                streams += measure_streams(
                    model, name, asked.streams, asked.tokens, asked.rounds, lambda: advance("streams")
                )
    return steps, products, streams, measure_sampler(asked.vocabularies, 5 * asked.rounds, lambda: advance("sampler"))


def main(arguments: Sequence[str] | None = None) -> int:
    asked = options(arguments)
    torch.set_num_threads(asked.threads)
    console = Console(width=150)
    piece_count = 3 * asked.rounds * len(asked.models) * len(asked.dtypes) + len(asked.vocabularies)
    with Progress(console=console, transient=True) as shown:
        task = shown.add_task("engine", total=piece_count)
        try:
            found = measure(asked, lambda what: shown.update(task, advance=1, description=what))
        except SpecdecError as error:
            console.print(f"{type(error).__name__}: {error}", style="red")
            return 1
    steps, products, streams, of_result = found
    large_gb_per_s = Reader(LARGE_BYTES).gb_per_s()
    for table in (
        tables.row_table(steps),
        *(tables.sequence_table(steps, rows) for rows in (1, 5)),
        tables.product_table(products),
        tables.stream_table(streams),
        tables.sampler_table(of_result),
    ):
        console.print(table)
    console.print(
        f"{asked.threads} thread(s), {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}. The memory "
        "limit: the bytes of a step's weights and cached positions, read as fast as a buffer of the weights' size was "
        f"in the same rounds; from a buffer of {LARGE_BYTES >> 20} MiB memory gave {large_gb_per_s:.1f} GB/s."
    )
    bars = bars_of(streams)
    save(asked, steps, products, streams, of_result, large_gb_per_s, bars)
    return conclude(bars, console, asked.check)


def bars_of(streams: Sequence[StreamMeasurement]) -> list[Bar]:
    """Streams decoding at once, for every model and type."""
    rates: dict[str, dict[int, float]] = {}
    for own in streams:
        rates.setdefault(f"{own.model} {own.dtype}", {})[own.streams] = own.tokens_per_s
    gains = {name: own[16] / own[1] for name, own in rates.items() if 1 in own and 16 in own}
    return [worst_of("plain decoding, 16 streams / 1, the engine alone", 5.0, gains, stretch=8.0)]


def save(
    asked: argparse.Namespace,
    steps: Sequence[StepMeasurement],
    products: Sequence[ProductMeasurement],
    streams: Sequence[StreamMeasurement],
    of_result: Sequence[SamplerMeasurement],
    large_gb_per_s: float,
    bars: Sequence[Bar],
) -> None:
    """The JSON, and the picture where it can be drawn."""
    asked.out.mkdir(parents=True, exist_ok=True)
    hardware = {
        "threads": asked.threads,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "large_gb_per_s": large_gb_per_s,
    }
    run = {
        "hardware": hardware,
        "steps": [asdict(step) for step in steps],
        "products": [asdict(one) for one in products],
        "streams": [asdict(stream) for stream in streams],
        "sampler": [asdict(one) for one in of_result],
        "bars": as_json(bars),
    }
    (asked.out / "engine.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    if plot.is_possible():
        picture(steps, streams, asked.out / "engine.png")


if __name__ == "__main__":
    sys.exit(main())
