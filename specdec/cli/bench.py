"""`specdec bench NAME`: runs one of the benchmarks every published figure comes from. They come with the source."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from specdec.cli.options import UsageError
from specdec.errors import ConfigError

BENCHMARKS = {
    "pipeline": ("bench.pipeline", "Three services on emulated machines, round trips from 0 to 100 ms, every variant."),
    "concurrency": ("bench.concurrency", "1 to 32 streams at once, on against off."),
    "draft": ("bench.draft", "The draft's step beside the bare loop of its model, and tokens that arrive."),
    "poor-drafts": ("bench.poor_drafts", "Drafts that are slow, wrong, silent or grow slow, against plain decoding."),
    "overhead": ("bench.overhead", "Time, CPU and bytes of a token beside the models, an echo and a bare server."),
    "peers": ("bench.peers", "transformers' own generation and assisted generation, and the engine alone."),
    "goals": ("bench.goals", "Each bar beside what the last runs reached."),
    "policy-cells": ("bench.policy_cells", "The policy in a simulated service, against off and the best fixed plan."),
    "rounds": ("bench.rounds", "Where the time of a round goes, by rule and draft length."),
    "engine": ("bench.engine", "The engine's step by rows, sequences and context, its streams and its evidence."),
    "tensor-parallel": ("bench.tensor_parallel", "The step of two ranks beside one's, and the memory of each rank."),
    "prefix": ("bench.prefix", "Time to the first token of prompts that are cached, and of those that are not."),
    "tracing": ("bench.tracing", "What tracing costs at 1 % and 100 %, and the spans of 10 to 2,000 rounds."),
    "ray-restarts": ("bench.ray_restarts", "From `specdec ray up` to the first token, and how long what dies is away."),
}


def overview() -> str:
    """What there is to run."""
    lines = ["usage: specdec bench NAME [FLAGS]", "", "Benchmarks:"]
    lines += [f"  {name:<16} {summary}" for name, (_, summary) in BENCHMARKS.items()]
    return "\n".join([*lines, "", "specdec bench NAME --help lists the flags of a benchmark."])


def bench(arguments: Sequence[str]) -> int:
    """Runs the benchmark named first. Raises UsageError, or ConfigError where the benchmarks are not at hand."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0
    name, *rest = arguments
    if name not in BENCHMARKS:
        raise UsageError(f"{name} is not a benchmark; choose from {', '.join(BENCHMARKS)}")
    source = Path(__file__).resolve().parents[2]
    if not (source / "bench" / "__init__.py").is_file():
        raise ConfigError("the benchmarks come with the source: run this from a checkout (make install)")
    sys.path.insert(0, str(source))
    module = BENCHMARKS[name][0]
    sys.argv = [f"specdec bench {name}", *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)  # a package runs by its __main__
    return 0
