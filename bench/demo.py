"""`make demo`: three services on this machine, three generations as they are committed, and a table.

Starts draft, target and coordinator as separate processes on free loopback ports, generates through the coordinator's
gRPC `Generate` with speculation and without, interleaved, prints what it measured, and stops everything it started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from rich.console import Console
from rich.table import Table

from bench.bars import Bar, add_check_flag, conclude, worst_of
from bench.harness import heldout_prompts, running
from specdec.cli.generate import LEGEND, colored
from specdec.errors import SpecdecError
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc

PROMPT_IDS = (0, 7, 20)  # held-out prompts whose acceptance is near the median of the first 40


@dataclass
class Run:
    """One generation as measured."""

    prompt_id: int
    speculates: bool
    tokens_per_s: float
    token_ids: list[int]
    finished: pb.Finished


def generate(
    stub: pb_grpc.CoordinatorServiceStub,
    prompt_id: int,
    prompt: str,
    speculates: bool,
    asked: argparse.Namespace,
    console: Console | None,
) -> Run:
    """Runs one generation; with a console, shows its text as it is committed."""
    sampling = pb.SamplingPolicy(max_tokens=asked.max_tokens, temperature=asked.temperature, ignore_eos=True)
    if asked.seed is not None:
        sampling.seed = asked.seed
    policy = pb.SpeculativePolicy(enabled=speculates)
    if speculates and asked.num_speculative_tokens is not None:
        policy.num_speculative_tokens = asked.num_speculative_tokens
    token_ids: list[int] = []
    first_s = last_s = 0.0
    finished = pb.Finished()
    request = pb.GenerateRequest(text=prompt, sampling=sampling, speculative=policy)
    for response in stub.Generate(request, timeout=120):
        if response.HasField("delta"):
            last_s = time.perf_counter()
            first_s = first_s or last_s
            token_ids += response.delta.token_ids
            if console:
                print(colored(response.delta) if console.is_terminal else response.delta.text, end="", flush=True)
        elif response.HasField("finished"):
            finished = response.finished
    rate = (len(token_ids) - 1) / (last_s - first_s) if last_s > first_s else 0.0
    return Run(prompt_id, speculates, rate, token_ids, finished)


def table_of(runs: list[Run]) -> Table:
    """One line per prompt: tokens/s with and without, their ratio, and how speculation went."""
    table = Table(title="speculation on and off, in turn, on the same services and prompts (medians)")
    for name in ("prompt", "on tok/s", "off tok/s", "on/off", "acceptance", "mean length", "link B/tok"):
        table.add_column(name, justify="right")
    for prompt_id in dict.fromkeys(run.prompt_id for run in runs):
        add_line(table, str(prompt_id), [run for run in runs if run.prompt_id == prompt_id])
    table.add_section()
    add_line(table, "all", runs)
    return table


def figures_of(runs: list[Run]) -> dict[str, float]:
    """Medians of rates, and of the ratio of each pair; totals of counts."""
    on = [run for run in runs if run.speculates]
    totals = [run.finished.statistics for run in on]
    drafted = sum(entry.num_draft_tokens for entry in totals)
    accepted = sum(entry.num_accepted_draft_tokens for entry in totals)
    steps = sum(entry.num_spec_steps for entry in totals)
    off = [run for run in runs if not run.speculates]
    pairs = zip(on, off, strict=True)  # measured one right after the other
    return {
        "on_tokens_per_s": statistics.median(run.tokens_per_s for run in on),
        "off_tokens_per_s": statistics.median(run.tokens_per_s for run in off),
        "ratio": statistics.median(fast.tokens_per_s / plain.tokens_per_s for fast, plain in pairs),
        "acceptance": accepted / drafted if drafted else 0.0,
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_link_bytes_per_token": sum(entry.draft_link_bytes for entry in totals)
        / max(1, sum(len(run.token_ids) for run in on)),
    }


def add_line(table: Table, name: str, runs: list[Run]) -> None:
    figures = figures_of(runs)
    table.add_row(
        name,
        f"{figures['on_tokens_per_s']:.0f}",
        f"{figures['off_tokens_per_s']:.0f}",
        f"{figures['ratio']:.2f}",
        f"{figures['acceptance']:.0%}",
        f"{figures['mean_acceptance_length']:.2f}",
        f"{figures['draft_link_bytes_per_token']:.0f}",
    )


def measure(address: str, asked: argparse.Namespace, console: Console) -> list[Run]:
    """Measures on and off in turn; each prompt's first generation is shown as it is committed."""
    prompts = heldout_prompts()
    runs: list[Run] = []
    with grpc.insecure_channel(address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        for prompt_id in PROMPT_IDS:
            console.rule(f"held-out prompt {prompt_id}", align="left")
            console.print(prompts[prompt_id], style="dim", end="", markup=False, highlight=False)
            runs.append(generate(stub, prompt_id, prompts[prompt_id], True, asked, console))
            runs.append(generate(stub, prompt_id, prompts[prompt_id], False, asked, None))
            console.print()
        for _ in range(asked.repeats - 1):
            for prompt_id in PROMPT_IDS:
                for speculates in (True, False):
                    runs.append(generate(stub, prompt_id, prompts[prompt_id], speculates, asked, None))
    return runs


def check_equal(runs: list[Run]) -> str:
    """The line that says whether on and off gave the same tokens, where they must."""
    by_prompt: dict[int, set[tuple[int, ...]]] = {}
    for run in runs:
        by_prompt.setdefault(run.prompt_id, set()).add(tuple(run.token_ids))
    same = all(len(texts) == 1 for texts in by_prompt.values())
    return "on and off: the same tokens, every time" if same else "on and off: DIFFERENT TOKENS, this is a defect"


def bars_of(runs: list[Run]) -> list[Bar]:
    """On / off on a service that has just started: of all texts together, and of each."""
    of_text = {
        f"prompt {prompt_id}": figures_of([run for run in runs if run.prompt_id == prompt_id])["ratio"]
        for prompt_id in dict.fromkeys(run.prompt_id for run in runs)
    }
    return [
        Bar("on / off after start: median", 1.25, figures_of(runs)["ratio"], stretch=1.5),
        worst_of("on / off after start: every text", 1.0, of_text),
    ]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--max-tokens", type=int, default=56, help="output tokens of each generation (56)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    help = "with a temperature: the rule COUPLED; absent: the service chooses the rule"
    parser.add_argument("--seed", type=int, help=help)
    parser.add_argument("--num-speculative-tokens", type=int, help="draft tokens in a verification (the service's)")
    parser.add_argument("--repeats", type=int, default=1, help="times each prompt is measured on and off (1)")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16 or auto (auto)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    add_check_flag(parser)
    return parser.parse_args()


def main() -> int:
    asked = options()
    console = Console()
    try:
        with contextlib.ExitStack() as stack:
            with console.status("starting target and draft"):
                services = stack.enter_context(running(threads=1, dtype=asked.dtype))
            places = (services.target, services.draft, services.coordinator)
            console.print("   ".join(f"{child.command} {child.address}" for child in places if child), highlight=False)
            if console.is_terminal:
                print(LEGEND)
            runs = measure(services.coordinator.address, asked, console)
    except SpecdecError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    console.print(table_of(runs))
    if asked.temperature == 0 or asked.seed is not None:
        console.print(check_equal(runs))
    if asked.json:
        asked.json.write_text(json.dumps(figures_of(runs), indent=2) + "\n", encoding="utf-8")
    return conclude(bars_of(runs), console, True) if asked.check else 0


if __name__ == "__main__":
    sys.exit(main())
