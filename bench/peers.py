"""`python -m bench.peers`: one stream beside `transformers` generate and assisted generation.

Same weights, same two cores, same prompts, in turns prompt by prompt. Ours is three services on loopback delays, the
target with one thread on one core, draft and coordinator on the other; theirs is one process that may use both cores,
with one thread, as our target has, or the requested number. Assisted generation runs at the best of a grid of its own
settings, found on other prompts. Texts that end in a cycle, which is easy to guess, are counted apart: bars are of the
others.
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

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.assisted import Assistance, Assisted
from bench.bars import Bar, add_check_flag, as_json, conclude
from bench.deepened import EXTRA_LAYERS_DEFAULT, write_deepened
from bench.pipeline.placement import Placed, description, placed
from bench.pipeline.samples import measure
from bench.pipeline.variants import AUTO, OFF, RULES_DEFAULT, Variant, rule_of
from bench.results import Ratio, ratio_of
from specdec.errors import SpecdecError
from tests.support.harness import DRAFT_MODEL, heldout_prompts

QUICK = {"prompts": 6, "tuning_prompts": 1, "tuning_tokens": 24, "max_tokens": 48}
TUNING_FIRST_ID = 150  # prompts from here on are for finding settings, never for measurements
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


def ours(place: Placed, rule: str, max_tokens: int, cyclic: set[int]) -> dict[str, Contender]:
    """The services. Prompts whose plain text ends in a cycle are added to `cyclic`."""

    def through_services(variant: Variant) -> Contender:
        def run(prompt_id: int, prompt: str) -> float:
            sample = measure(place.stub_of(variant), variant, rule, 0.0, (prompt_id, prompt), max_tokens)
            if variant == OFF and sample.is_cyclic:
                cyclic.add(prompt_id)
            return sample.tokens_per_s

        return run

    return {variant.name: through_services(variant) for variant in (AUTO, OFF)}


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
    """Returns tokens/s by rule and contender, one value per prompt, and the settings of assisted generation."""
    prompts = list(heldout_prompts().items())
    tuning = [prompt for prompt_id, prompt in prompts if prompt_id >= TUNING_FIRST_ID][: asked.tuning_prompts]
    cores = os.sched_getaffinity(0)
    library = Assisted(model, asked.dtype, DRAFT_MODEL, asked.draft_dtype)
    rates: dict[str, dict[str, list[float]]] = {}
    settings: dict[str, dict[int, Assistance]] = {}
    cyclic: dict[str, list[bool]] = {}
    with placed(model, asked.dtype, asked.draft_dtype) as place:
        hardware = description(place)
        for rule in [RULES_DEFAULT[number] for number in asked.rules]:
            temperature = rule_of(rule)[1]
            console.print(f"finding assisted generation's best settings, {rule}", style="dim")
            with on_cores(cores):
                best = {n: library.tuned(tuning, temperature, asked.tuning_tokens, n) for n in asked.threads}
            looping: set[int] = set()
            contenders = ours(place, rule, asked.max_tokens, looping)
            contenders |= theirs(library, temperature, asked.max_tokens, best, cores)
            own: dict[str, list[float]] = {name: [] for name in contenders}
            for prompt_id, prompt in track([prompts[0], *prompts[: asked.prompts]], rule, console=Console(stderr=True)):
                for name, contender in contenders.items():
                    own[name].append(contender(prompt_id, prompt))
            rates[rule] = {name: values[1:] for name, values in own.items()}  # the first round warms up
            settings[rule] = best
            cyclic[rule] = [prompt_id in looping for prompt_id, _ in prompts[: asked.prompts]]
    return {"hardware": hardware, "rates": rates, "assistance": settings, "cyclic": cyclic}


def table_of(found: dict[str, Any]) -> Table:
    """A line per rule and contender: medians, and auto over it on the same prompts, of texts of either kind."""
    table = Table(title="one stream, no network delay; medians over prompts")
    headings = ("rule", "", "tokens/s", "auto / it [95 %]", "texts that cycle", "auto / it [95 %]", "settings")
    for name in headings:
        table.add_column(name, justify="left" if name in ("rule", "", "settings") else "right")
    for rule, own in found["rates"].items():
        for name, values in own.items():
            threads = int(name.split(", ")[1].split()[0]) if name.startswith("assisted") else 0
            best = " ".join(map(str, asdict(found["assistance"][rule][threads]).values())) if threads else ""
            ratios = [auto_over(own, name, found["cyclic"][rule], is_cyclic) for is_cyclic in (False, True)]
            shown = ["" if ratio is None else str(ratio) for ratio in ratios]
            cyclic_count = str(sum(found["cyclic"][rule]))
            table.add_row(rule, name, f"{statistics.median(values):.1f}", shown[0], cyclic_count, shown[1], best)
        table.add_section()
    return table


def auto_over(own: dict[str, list[float]], name: str, cyclic: list[bool], is_cyclic: bool) -> Ratio | None:
    """Auto's tokens/s over another's on the same prompts, of texts that end in a cycle or of the others; None where
    there are none."""
    pairs = zip(own[AUTO.name], own[name], cyclic, strict=True)
    ratios = [auto / other for auto, other, cycles in pairs if cycles is is_cyclic]
    return ratio_of(ratios) if ratios else None


def bars_of(found: dict[str, Any]) -> list[Bar]:
    """Against assisted generation with one thread, greedy."""
    greedy, assisted = RULES_DEFAULT[0], "assisted, 1 thread(s)"
    own = found["rates"].get(greedy, {})
    ratio = auto_over(own, assisted, found["cyclic"][greedy], False) if assisted in own else None
    claim, shown = "auto / assisted generation, greedy, one thread each", str(ratio or "")
    return [
        Bar(f"{claim}: median", 1.2, None if ratio is None else ratio.median, shown, stretch=1.5),
        Bar(f"{claim}: lower end of the interval", 1.1, None if ratio is None else ratio.low, shown),
    ]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=40, help="held-out prompts (%(default)s)")
    parser.add_argument("--tuning-prompts", type=int, default=8, help="others, to find settings (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="output tokens of a generation (%(default)s)")
    parser.add_argument("--tuning-tokens", type=int, default=48, help="of a generation that tunes (%(default)s)")
    parser.add_argument("--rules", type=int, nargs="+", default=[0], help="by number, as bench.pipeline lists them")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="theirs (%(default)s)")
    parser.add_argument("--extra-layers", type=int, default=EXTRA_LAYERS_DEFAULT, help="of the target (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of the target (%(default)s)")
    parser.add_argument("--draft-dtype", default="float32", help="of the draft (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="about three minutes: few prompts, short texts")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    add_check_flag(parser)
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args()


def main() -> int:
    asked = options()
    console = Console(width=170)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            found = compare(asked, write_deepened(Path(scratch), asked.extra_layers), console)
    except SpecdecError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    console.print(table_of(found))
    bars = bars_of(found)
    settings = {rule: {n: asdict(own) for n, own in by.items()} for rule, by in found["assistance"].items()}
    asked.out.mkdir(parents=True, exist_ok=True)
    written = found | {"assistance": settings, "asked": vars(asked) | {"out": ""}, "bars": as_json(bars)}
    (asked.out / "peers.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
