"""`python -m bench.step`: a step on a CPU beside reading its weights once, by rows, of dense and packed weights; and
the pass of a feature head beside a step of its target.

All models are loaded and take turns, with one thread and with two.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.bars import Bar, worst_of
from bench.results import Cell, Ratio, Results, Table, shown
from bench.runner import Contender, Prepared, main
from bench.step.models import DEEPENED, DENSE, EIGHT, FOUR, FP8, write_model
from bench.step.rows import PASSES, READING, SHAPES, Reading, Rows, WithHead
from specdec.engine.cpu.kernels import kernels

MODELS = (DENSE, FOUR, EIGHT, FP8, DEEPENED)
HEADS = {f"{name}, head": name for name in (DENSE, FOUR)}
OVER_READING, OVER_CHAIN, PASS_OVER_STEP, LOADED_OVER_PLAIN = 1.15, 1.05, 0.12, 1.02
FLAT = {"4 rows": (1.2, 1.05), "8 rows": (1.7, 1.25)}  # over one row: bar and stretch
FLAT_BFLOAT16 = 1.15  # of 8 rows, with instructions that multiply bfloat16
BFLOAT16_FAMILY = "avx512_bf16"
PACKED = {FOUR: 0.5, EIGHT: 0.65, FP8: 0.65}  # the step of one row over bfloat16's
ONE, EIGHT_ROWS, TREE = "1 row", "8 rows", "8 on 4 paths"


def threads_of(cell: Cell) -> str:
    return f"{cell['threads']} thread{'s' * (int(cell['threads']) > 1)}"


class Step:
    """See the module."""

    name = "step"
    about = "a step on a CPU by rows, beside reading its weights once, and a feature head's pass"
    turns, quick_turns, minutes = 25, 3, 5

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--models", nargs="+", choices=MODELS, help="(all; two with --quick)")
        parser.add_argument("--head", type=Path, help="folder of a feature head of the chat model (random weights)")

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        return [{"threads": threads} for threads in ((1,) if asked.quick else (1, 2))]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        with TemporaryDirectory() as scratch:
            names = asked.models or (MODELS[:2] if asked.quick else MODELS)
            folders = {name: write_model(name, Path(scratch) / str(place)) for place, name in enumerate(names)}
            reading = Reading()
            loaded: dict[str, Contender] = {}
            for name, folder in folders.items():
                loaded[name] = Rows(folder, reading).times_ms
                if name in HEADS.values():
                    loaded[f"{name}, head"] = WithHead(folder, asked.head).times_ms

            def contenders(cell: Cell, results: Results) -> Mapping[str, Contender]:
                used = kernels()
                results.notes["kernels"] = used.family if used else "none"
                torch.set_num_threads(int(cell["threads"]))
                return loaded

            yield contenders

    def tables(self, results: Results) -> list[Table]:
        rows, heads = [], []
        for cell, samples in results.found:
            for name in (name for name in MODELS if name in samples):
                times = (shown(results.median(cell, name, measure)) for measure in (READING, *SHAPES))
                ratios = [
                    (results.ratio(cell, name, name, ONE, READING), OVER_READING if name == DENSE else None),
                    (results.ratio(cell, name, name, EIGHT_ROWS, ONE), None),
                    (results.ratio(cell, name, DENSE, ONE) if name in PACKED else None, PACKED.get(name)),
                ]
                told = (ratio.short(bound, is_limit=True) if ratio else "" for ratio, bound in ratios)
                rows.append([f"{name}, {threads_of(cell)}", *times, *told])
            for name in (name for name in HEADS if name in samples):
                step = shown(results.median(cell, HEADS[name], ONE))
                passes = (shown(results.median(cell, name, measure)) for measure in PASSES)
                own = head_ratios(results, cell, name)
                limits = zip(own, (PASS_OVER_STEP, LOADED_OVER_PLAIN))
                told = (ratio.short(bound, is_limit=True) if ratio else "" for ratio, bound in limits)
                heads.append([f"{HEADS[name]}, {threads_of(cell)}", step, *passes, *told])
        columns = ["ms", "reading", *SHAPES, "1 row / reading", "8 rows / 1", "1 row / bfloat16's"]
        columns_of_heads = ["ms", "step of 1 row", *PASSES, "pass / step", "step with the head / without"]
        return [
            Table("rows", "a step of one sequence after 100 tokens, and reading its weights once", columns, rows),
            Table("heads", "the pass of a feature head beside a step of its target", columns_of_heads, heads),
        ]

    def bars(self, results: Results) -> Sequence[Bar]:
        def ratios(name: str, over: str, measure: str, over_measure: str = "") -> dict[str, float]:
            found = {
                threads_of(cell): results.ratio(cell, name, over, measure, over_measure) for cell, _ in results.found
            }
            return {threads: ratio.median for threads, ratio in found.items() if ratio}

        has_bfloat16 = results.notes.get("kernels") == BFLOAT16_FAMILY
        limits = ratios(DENSE, DENSE, ONE, READING)
        bars = [worst_of(f"{DENSE}: step of one row / reading its weights", OVER_READING, limits, True, 1.05)]
        for rows, (bound, stretch) in FLAT.items():
            bound, best = (FLAT_BFLOAT16, None) if has_bfloat16 and rows == EIGHT_ROWS else (bound, stretch)
            bars.append(worst_of(f"{DENSE}: {rows} / one", bound, ratios(DENSE, DENSE, rows, ONE), True, best))
        trees = ratios(DENSE, DENSE, TREE, EIGHT_ROWS)
        bars.append(worst_of(f"{DENSE}: tree of 8 rows on 4 paths / chain of 8", OVER_CHAIN, trees, True))
        for name, bound in PACKED.items():
            bars.append(worst_of(f"{name}: step of one row / bfloat16's", bound, ratios(name, DENSE, ONE), True))
        passes, loaded = {}, {}
        for cell, _ in results.found:
            for name in HEADS:
                of_pass, of_step = head_ratios(results, cell, name)
                if of_pass and of_step:
                    place = f"{HEADS[name]}, {threads_of(cell)}"
                    passes[place], loaded[place] = of_pass.median, of_step.median
        bars.append(worst_of("a head's pass / a step of one row", PASS_OVER_STEP, passes, True))
        return [*bars, worst_of("a step with a head loaded / without", LOADED_OVER_PLAIN, loaded, True)]


def head_ratios(results: Results, cell: Cell, name: str) -> tuple[Ratio | None, Ratio | None]:
    """A head's pass, and a step of its target with it, over a step without it."""
    plain = HEADS[name]
    return results.ratio(cell, name, plain, "pass of 1", ONE), results.ratio(cell, name, plain, ONE)


BENCHMARK = Step()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
