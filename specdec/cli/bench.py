"""`specdec bench NAME`: runs one of the benchmarks that every published measurement comes from.

They are in the folder `bench` of a checkout, beside this package, and not in an installed wheel.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from specdec.cli.options import UsageError
from specdec.errors import ConfigError
from specdec.terminal import print_text

CHECKOUT = Path(__file__).resolve().parents[2]

BENCHMARKS = {
    "pipeline": ("pipeline", "Three services on emulated machines, round trips from 0 to 100 ms, every variant."),
    "concurrency": ("concurrency", "1 to 32 streams at once, on against off."),
    "draft": ("draft", "The draft's step beside the bare loop of its model, and tokens that arrive."),
    "poor-drafts": ("poor_drafts", "Drafts that are slow, wrong, silent or grow slow, against plain decoding."),
    "overhead": ("overhead", "Time, CPU and bytes of a token beside the models, an echo and a bare server."),
    "proposers": (
        "proposers",
        "Trees, each proposer, predictions and heads, against chains, plain decoding and peers.",
    ),
    "pair": ("pair", "The chat model with its draft, or a given pair, against plain decoding."),
    "peers": ("peers", "transformers' own generation and assisted generation, and the engine alone."),
    "translation": ("translation", "A draft with another tokenizer, beside the translator of transformers."),
    "coverage": ("coverage", "How often the intervals of specdec advise hold on new prompts."),
    "goals": ("goals", "Each bar beside what the last runs reached."),
    "policy-cells": ("policy_cells", "The policy in a simulated service, against off and the best fixed plan."),
    "rounds": ("rounds", "Where the time of a round goes, by rule and draft length."),
    "engine": ("engine", "The engine's step by rows, sequences and context, its streams and its sampler."),
    "step": ("step", "A step beside reading its weights once, plain decoding beside llama.cpp, the step by part."),
    "tensor-parallel": ("tensor_parallel", "The step of two ranks beside one's, and the memory of each rank."),
    "prefix": ("prefix", "Time to the first token of prompts that are cached, and of those that are not."),
    "startup": ("startup", "From the start of a replica to SERVING by phase."),
    "tracing": ("tracing", "What tracing costs at 1 % and 100 %, and the spans of 10 to 2,000 rounds."),
    "ray-restarts": ("ray_restarts", "From `specdec ray up` to the first token, and how long what dies is away."),
}


def overview() -> str:
    """Returns the list of benchmarks."""
    lines = ["usage: specdec bench NAME [FLAGS]", "", "Benchmarks:"]
    lines += [f"  {name:<16} {summary}" for name, (_, summary) in BENCHMARKS.items()]
    return "\n".join([*lines, "", "They run from a checkout; specdec bench NAME --help lists the flags of one."])


def bench(arguments: Sequence[str]) -> int:
    """Runs the benchmark named first; `--list` prints the names. Raises UsageError, and ConfigError outside a
    checkout."""
    if not arguments or arguments[0] in ("-h", "--help", "--list"):
        print_text(overview())
        return 0
    name, *rest = arguments
    if name not in BENCHMARKS:
        raise UsageError(f"{name} is not a benchmark; choose from {', '.join(BENCHMARKS)}")
    module = f"bench.{BENCHMARKS[name][0]}"
    if not (CHECKOUT / "bench" / "harness.py").is_file():
        raise ConfigError(
            f"benchmarks are not installed, they run from a checkout of specdec: python -m {module} in its folder, or "
            f"specdec bench {name} after pip install -e ."
        )
    sys.path.insert(0, str(CHECKOUT))
    sys.argv = [f"specdec bench {name}", *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)  # a package runs by its __main__
    return 0
