"""`python -m bench.peers`: one stream beside `transformers` generate and assisted generation, and the engine alone.

Same weights, same two cores, same prompts, in turns prompt by prompt. Ours is three services on loopback delays, the
target with one thread on one core, draft and coordinator on the other; theirs is one process that may use both cores,
with one thread, as our target has, and with two. Assisted generation runs at the best of a grid of its own settings,
found on other prompts. The engine alone is plain decoding in one process without services: what `off` is held against.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from bench.assisted import Assistance, Assisted
from bench.deepened import EXTRA_LAYERS_DEFAULT, write_deepened
from bench.engine_alone import EngineAlone
from bench.harness import DRAFT_MODEL, TARGET_MODEL, heldout_prompts
from bench.pipeline.placement import Placed, description, placed
from bench.pipeline.variants import rule_of
from bench.pipeline.samples import measure
from bench.pipeline.variants import AUTO, OFF, RULES_DEFAULT, Variant
from specdec.errors import SpecdecError
from specdec.protocol.types import Law

THREAD_COUNTS = (1, 2)
TUNING_FIRST_ID = 150  # prompts from here on are for finding settings, never for figures
Contender = Callable[[int, str], float]  # (prompt id, prompt) -> tokens per second


@contextlib.contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """The calling thread, and threads begun meanwhile, may use these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def ours(place: Placed, engine: EngineAlone, rule: str, max_tokens: int) -> dict[str, Contender]:
    """The services, and the engine alone."""
    tokenizer = Tokenizer.from_file(str(TARGET_MODEL / "tokenizer.json"))
    kind, temperature = rule_of(rule)

    def alone(prompt_id: int, prompt: str) -> float:
        ids = tuple(tokenizer.encode(prompt).ids)
        torch.set_num_threads(1)
        return engine.generate(Law(kind, prompt_id, len(ids), temperature), ids, max_tokens)[1]

    def through_services(variant: Variant) -> Contender:
        def run(prompt_id: int, prompt: str) -> float:
            return measure(place.stub, variant, rule, 0.0, (prompt_id, prompt), max_tokens).tokens_per_s

        return run

    return {variant.name: through_services(variant) for variant in (AUTO, OFF)} | {"engine alone": alone}


def theirs(
    library: Assisted, temperature: float, max_tokens: int, best: dict[int, Assistance], cores: set[int]
) -> dict[str, Contender]:
    """`transformers`, plain and assisted, by threads."""

    def contender(threads: int, assistance: Assistance | None) -> Contender:
        def run(_prompt_id: int, prompt: str) -> float:
            with on_cores(cores):
                return library.generate(prompt, temperature, max_tokens, threads, assistance)

        return run

    plain = {f"generate, {count} thread(s)": contender(count, None) for count in best}
    assisted = {f"assisted, {count} thread(s)": contender(count, own) for count, own in best.items()}
    return plain | assisted


def compare(asked: argparse.Namespace, model: Path, console: Console) -> dict[str, Any]:
    """Tokens/s by rule and contender, one figure per prompt, and the settings assisted generation ran at."""
    prompts = list(heldout_prompts().items())
    tuning = [prompt for prompt_id, prompt in prompts if prompt_id >= TUNING_FIRST_ID][: asked.tuning_prompts]
    cores = os.sched_getaffinity(0)
    library = Assisted(model, asked.dtype, DRAFT_MODEL, asked.draft_dtype)
    with on_cores({min(cores)}):
        engine = EngineAlone(model, asked.dtype)
    rates: dict[str, dict[str, list[float]]] = {}
    settings: dict[str, dict[int, Assistance]] = {}
    with placed(model, asked.dtype, asked.draft_dtype) as place:
        hardware = description(place)
        for rule in [RULES_DEFAULT[number] for number in asked.rules]:
            temperature = rule_of(rule)[1]
            console.print(f"finding assisted generation's best settings, {rule}", style="dim")
            with on_cores(cores):
                best = {n: library.tuned(tuning, temperature, asked.max_tokens, n) for n in asked.threads}
            contenders = ours(place, engine, rule, asked.max_tokens)
            contenders |= theirs(library, temperature, asked.max_tokens, best, cores)
            own: dict[str, list[float]] = {name: [] for name in contenders}
            for prompt_id, prompt in track([prompts[0], *prompts[: asked.prompts]], rule, console=Console(stderr=True)):
                for name, contender in contenders.items():
                    own[name].append(contender(prompt_id, prompt))
            rates[rule] = {name: values[1:] for name, values in own.items()}  # the first round warms up
            settings[rule] = best
    engine.stop()
    return {"hardware": hardware, "rates": rates, "assistance": settings}


def table_of(rates: dict[str, dict[str, list[float]]], settings: dict[str, dict[int, Assistance]]) -> Table:
    """A line per rule and contender: medians, and auto over it on the same prompts."""
    table = Table(title="one stream, no network delay; medians over prompts")
    for name in ("rule", "", "tokens/s", "auto / it", "settings"):
        table.add_column(name, justify="right" if name in ("tokens/s", "auto / it") else "left")
    for rule, own in rates.items():
        for name, values in own.items():
            threads = int(name.split(", ")[1].split()[0]) if name.startswith("assisted") else 0
            best = " ".join(map(str, asdict(settings[rule][threads]).values())) if threads else ""
            table.add_row(rule, name, f"{statistics.median(values):.1f}", f"{auto_over(own, name):.2f}", best)
        table.add_section()
    return table


def auto_over(own: dict[str, list[float]], name: str) -> float:
    """Median over prompts of auto's tokens/s over another's."""
    return statistics.median(auto / other for auto, other in zip(own[AUTO.name], own[name], strict=True))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=9, help="held-out prompts (%(default)s)")
    parser.add_argument("--tuning-prompts", type=int, default=2, help="others, to find settings (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, help="output tokens of a generation (%(default)s)")
    parser.add_argument("--rules", type=int, nargs="+", default=[0, 2], help="by number, as bench.pipeline lists them")
    parser.add_argument("--threads", type=int, nargs="+", default=list(THREAD_COUNTS), help="theirs (%(default)s)")
    parser.add_argument("--extra-layers", type=int, default=EXTRA_LAYERS_DEFAULT, help="of the target (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of the target (%(default)s)")
    parser.add_argument("--draft-dtype", default="float32", help="of the draft (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    return parser.parse_args()


def main() -> int:
    asked = options()
    console = Console(width=140)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            found = compare(asked, write_deepened(Path(scratch), asked.extra_layers), console)
    except SpecdecError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    rates = found["rates"]
    console.print(table_of(rates, found["assistance"]))
    best = {rule: [name for name in own if name.startswith("assisted")] for rule, own in rates.items()}
    against = {rule: min(auto_over(rates[rule], name) for name in names) for rule, names in best.items()}
    settings = {rule: {n: asdict(own) for n, own in by.items()} for rule, by in found["assistance"].items()}
    asked.out.mkdir(parents=True, exist_ok=True)
    written = found | {"assistance": settings, "against_assisted": against, "asked": vars(asked) | {"out": ""}}
    (asked.out / "peers.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
