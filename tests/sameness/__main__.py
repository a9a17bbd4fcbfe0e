"""`python -m tests.sameness`: 1,000 prompts of 128 tokens, speculation on = off through running services.

For each dtype the three services are started with the shipped pair, or that of `--models`, and every prompt is
generated with speculation and without, GREEDY and COUPLED with seeds, all ways to speculate, many streams at a time.
Tokens, text and log-probabilities must be equal to the last bit; ends with 1 where they are not, and with 2 and the
reason where a run ends before all are compared: services that do not start in time or are lost. `--target` sets options
of the target service: ranks, a small cache, prefix caching. The shipped target has its heads if a way asks for them.
`--packed` runs it in packed formats, one after the other.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import grpc
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from specdec.errors import SpecdecError
from tests.sameness.comparison import Comparison, compare
from tests.sameness.generations import ALL_PARAMS, HEADS_WAY, WAYS, generations
from tests.support.packed_pairs import FORMATS, write_pair
from tests.support.services import MODELS, Services, running

SHOWN_MAX = 10
DIFFERENT, INCOMPLETE = 1, 2  # exit codes


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sameness", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each, on and off (%(default)s)")
    parser.add_argument("--streams", type=int, default=16, help="generations at a time (%(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of both models (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each model (%(default)s)")
    parser.add_argument(
        "--models", nargs=2, type=Path, metavar=("TARGET", "DRAFT"), help="folders of both (the shipped pair)"
    )
    parser.add_argument(
        "--packed", nargs="+", choices=FORMATS, metavar="FORMAT", help="of the target's weights: %(choices)s"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, metavar="NAME", help="to speculate (all; no heads of others)"
    )
    parser.add_argument(
        "--target",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="settings of the target service by the names of its flags, as in tensor-parallel-size=2",
    )
    asked = parser.parse_args(arguments)
    if strangers := [own for own in asked.target if "=" not in own]:
        parser.error(f"--target takes NAME=VALUE; not {', '.join(strangers)}")
    if asked.packed and asked.models:
        parser.error("--packed is of the shipped pair; not of --models")
    asked.ways = asked.ways or [way for way in WAYS if way != HEADS_WAY or not (asked.models or asked.packed)]
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    asked = options(arguments)
    console = Console(width=120)
    if not asked.packed:
        return run(asked, console)
    results = set()
    for name in asked.packed:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder  # where folders of GGUF files are made
            asked.models = write_pair(name, Path(folder))
            console.print(f"{name}:")
            results.add(run(asked, console))
    return max(results)


def run(asked: argparse.Namespace, console: Console) -> int:
    """Compares one pair with each dtype; returns an exit code."""
    target = target_settings(asked)
    is_same = is_complete = True
    for dtype in asked.dtypes:
        began_s, refusals = time.monotonic(), Counter[str]()
        found: list[Comparison] = []
        try:
            compare_all(asked, dtype, target, refusals, console, found)
        except (SpecdecError, grpc.RpcError) as error:
            is_complete = False
            ended = f"{dtype}: ended after {len(found)} of {asked.prompts} prompts: {reason_of(error)}"
            console.print(ended, style="red", markup=False)
            if not found:
                continue
        console.print(table_of(found, " ".join([f"{dtype}, {asked.threads} thread(s)", *asked.target])))
        tokens = sum(len(one.on.token_ids) for one in found)
        cached, preempted = (sum(one.total(name) for one in found) for name in ("cached_prompt_tokens", "preemptions"))
        console.print(
            f"{tokens} tokens with speculation and as many without in {time.monotonic() - began_s:.0f} s; "
            f"{cached} cached prompt tokens, {preempted} preemptions, {refusals['refused']} requested again"
        )
        differing = [one for one in found if not one.is_same]
        for one in differing[:SHOWN_MAX]:
            console.print(str(one), style="red")
        is_tried = any(one.accepted_count for one in found)
        if not is_tried:
            console.print("no draft token was accepted: nothing was tried", style="red")
        with_heads = [one for one in found if one.generation.way == HEADS_WAY]
        if with_heads and not any(one.heads_count for one in with_heads):
            console.print(f"no token of the heads was offered: {HEADS_WAY} was not tried", style="red")
            is_tried = False
        is_same = is_same and not differing and (is_tried or len(found) < asked.prompts)
    return DIFFERENT if not is_same else 0 if is_complete else INCOMPLETE


def reason_of(error: SpecdecError | grpc.RpcError) -> str:
    """Returns an error and the notes about it in one line."""
    said = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
    return "; ".join([said, *getattr(error, "__notes__", ())])


def target_settings(asked: argparse.Namespace) -> dict[str, str]:
    """Returns the settings of the target: the shipped one's heads if a way asks for them, and those of `--target`."""
    has_heads = HEADS_WAY in asked.ways and not asked.models
    heads = {"heads": str(MODELS / "target-heads")} if has_heads else {}
    return heads | {name.replace("-", "_"): value for name, value in (own.split("=", 1) for own in asked.target)}


def compare_all(
    asked: argparse.Namespace,
    dtype: str,
    target: dict[str, str],
    refusals: Counter[str],
    console: Console,
    found: list[Comparison],
) -> None:
    """Adds the comparisons of all prompts with one dtype to `found`, with a progress bar. Raises SpecdecError if the
    services do not start, grpc.RpcError with a note about services that ended."""
    models = asked.models or (MODELS / "target", MODELS / "draft")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        running(*models, threads=asked.threads, dtype=dtype, target=target) as services,
        Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as shown,
    ):
        task = shown.add_task(dtype, total=asked.prompts)
        own = services.client.described().target
        console.print(f"{dtype}: {own.numerics.device}, {own.numerics.libraries}", markup=False, soft_wrap=True)
        length_max = own.encoder_positions_max or own.positions_max - asked.tokens
        wanted = generations(asked.prompts, asked.ways, models[0], length_max)

        def refused() -> None:
            refusals["refused"] += 1

        try:
            for one in compare(services.client, wanted, asked.tokens, asked.streams, refused):
                found.append(one)
                differing_count = sum(not own.is_same for own in found)
                shown.update(task, advance=1, description=f"{dtype}, {differing_count} differ")
        except grpc.RpcError as error:
            error.add_note(states_of(services))
            raise


def states_of(services: Services) -> str:
    """Returns which of the services run, in words."""
    children = (services.target, services.draft, services.coordinator)
    return ", ".join(str(child) for child in children if child is not None)


def table_of(found: Sequence[Comparison], title: str) -> Table:
    """Returns the table with a line per sampling parameters and per way to speculate."""
    table = Table(title=f"Speculation on and off: {title}", title_justify="left")
    for name in ("", "prompts", "tokens", "draft tokens", "accepted", "prompts that differ", "tokens that differ"):
        table.add_column(name, justify="right" if name else "left")
    groups = [(params, [one for one in found if one.generation.params == params]) for params in ALL_PARAMS]
    groups += [(way, [one for one in found if one.generation.way == way]) for way in WAYS]
    for name, own in [*groups, ("all", list(found))]:
        counts = (
            len(own),
            sum(len(one.on.token_ids) for one in own),
            sum(one.drafted_count for one in own),
            sum(one.accepted_count for one in own),
            sum(not one.is_same for one in own),
            sum(one.differing_token_count for one in own),
        )
        table.add_row(name, *map(str, counts), end_section=name in (list(ALL_PARAMS)[-1], WAYS[-1]))
    return table


if __name__ == "__main__":
    sys.exit(main())
