"""`python -m bench.against CHECKOUT`: the cost beside the models of this checkout and of another one, in turns.

Each checkout's services are processes of its own environment (`.venv`), started by their commands, all on loopback and
on the same models. A turn measures both, in alternating order: a round of plain decoding beyond the target's forward
pass and sampler, with models that compute nothing and with the embedded pair; and the coordinator's CPU per committed
token at many streams. It knows nothing of the other checkout but its commands and the wire.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import track
from rich.table import Table

import specdec
from bench.overhead import GREEDY, STREAM_COUNT, TABLE_PROMPT, beyond_ms
from bench.pipeline.placement import processor_name
from bench.pipeline.samples import measure
from bench.pipeline.variants import AUTO, OFF, Variant
from bench.results import Ratio, ratio_of
from bench.rounds import table_models
from bench.streams import PROMPT_CHARACTERS, run_streams
from specdec.errors import SpecdecError
from specdec.settings import ENVIRONMENT_PREFIX
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.harness import DRAFT_MODEL, TARGET_MODEL, heldout_prompts
from tests.support.processes import cpu_seconds

ROOT = Path(specdec.__file__).resolve().parents[1]
STOP_S = 5.0
TABLE_TOKENS, PAIR_TOKENS, STREAM_TOKENS = 400, 128, 64
ROUND = "round beyond forward and sampler, off, {}, ms"
CPU = "coordinator CPU a token, {} streams, {}, µs"


@dataclass(frozen=True, slots=True)
class Side:
    """The services of one checkout. `coordinators`: address and process of those of OFF and of AUTO, which learns from
    its own rounds."""

    coordinators: dict[Variant, tuple[str, int]]
    stub: pb_grpc.CoordinatorServiceStub


def track_quietly(items: Sequence[Any], what: str) -> Iterator[Any]:
    return iter(track(items, what, console=Console(stderr=True)))


def python_of(checkout: Path) -> str:
    """Returns the interpreter of a checkout's environment. Raises SpecdecError where there is none, or where it runs
    the code of another checkout."""
    python = str(checkout / ".venv" / "bin" / "python")
    try:
        asked = [python, "-P", "-c", "import specdec; print(specdec.__file__)"]
        file = Path(subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.strip())
    except (OSError, subprocess.CalledProcessError) as error:
        raise SpecdecError(
            f"{checkout} has no environment with specdec: {error}; make it with `make install`"
        ) from None
    if not file.resolve().is_relative_to(checkout.resolve()):
        raise SpecdecError(f"the environment of {checkout} runs {file}: install that checkout in it, editable")
    return python


def service(stack: contextlib.ExitStack, python: str, command: str, **flags: object) -> tuple[str, int]:
    """Starts a service of an environment, stopped with `stack`; returns address and process. Raises SpecdecError."""
    given = {"port": 0, "log_level": "error", "drain_grace_s": 1.0, **flags}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    own = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    process = subprocess.Popen(
        [python, "-P", "-m", "specdec.cli", command, *arguments], env=own, stdout=subprocess.PIPE, text=True
    )
    stack.callback(stop, process)
    assert process.stdout is not None
    for line in process.stdout:
        said, is_ready, address = line.strip().partition(" serves on ")
        if is_ready and said == command:
            return address, process.pid
    raise SpecdecError(f"the {command} of {python} ended with code {process.wait()} before it was ready")


def stop(process: subprocess.Popen[str]) -> None:
    """Ends a service, whatever it does."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextlib.contextmanager
def served(pythons: Sequence[str], target: Path, draft: Path) -> Iterator[list[Side]]:
    """The services of each environment on the same models."""
    with contextlib.ExitStack() as stack:
        sides = []
        for python in pythons:
            main, _ = service(stack, python, "target", model=target, threads=1)
            own = {"model": draft, "target_tokenizer": target, "threads": 1}
            guess, _ = service(stack, python, "draft", **own)
            own = {"tokenizer": target, "target": main, "draft": guess}
            coordinators = {variant: service(stack, python, "coordinator", **own) for variant in (OFF, AUTO)}
            channel = stack.enter_context(grpc.insecure_channel(coordinators[OFF][0]))
            sides.append(Side(coordinators, pb_grpc.CoordinatorServiceStub(channel)))
        yield sides


def cpu_us(side: Side, variant: Variant, prompts: Sequence[str]) -> float:
    """Microseconds of a coordinator's CPU per token of these streams, all at once."""
    address, pid = side.coordinators[variant]
    before_s = cpu_seconds(pid)
    streams = asyncio.run(run_streams([address], variant, GREEDY, prompts, STREAM_TOKENS))
    return (cpu_seconds(pid) - before_s) / sum(len(stream.token_ids) for stream in streams) * 1e6


def compared(pythons: Sequence[str], turns: int, stream_turns: int, stream_count: int) -> dict[str, list[list[float]]]:
    """Returns by measurement the values of each environment, turn by turn; one turn before them warms up."""
    found: dict[str, list[list[float]]] = {}

    def take(name: str, turn: int, values: dict[int, float]) -> None:
        if turn:
            own = found.setdefault(name, [[] for _ in pythons])
            for place, value in values.items():
                own[place].append(value)

    def order(turn: int) -> Sequence[int]:
        return range(len(pythons)) if turn % 2 else range(len(pythons))[::-1]

    texts = heldout_prompts()
    with tempfile.TemporaryDirectory() as scratch, served(pythons, *table_models(Path(scratch))) as sides:
        for turn in track_quietly(range(turns + 1), "rounds of table models"):
            samples = {
                place: measure(sides[place].stub, OFF, GREEDY, 0.0, TABLE_PROMPT, TABLE_TOKENS) for place in order(turn)
            }
            take(ROUND.format("table models"), turn, {place: beyond_ms(own) for place, own in samples.items()})
    with served(pythons, TARGET_MODEL, DRAFT_MODEL) as sides:
        prompt = next(iter(texts.items()))  # in the cache after the first turn: rounds have no prompt's forward pass
        for turn in track_quietly(range(turns + 1), "rounds of the embedded pair"):
            samples = {
                place: measure(sides[place].stub, OFF, GREEDY, 0.0, prompt, PAIR_TOKENS) for place in order(turn)
            }
            take(ROUND.format("embedded pair"), turn, {place: beyond_ms(own) for place, own in samples.items()})
        many = [prompt[:PROMPT_CHARACTERS] for prompt in texts.values()][:stream_count]
        for turn in track_quietly(range(stream_turns + 1), f"{stream_count} streams"):
            for variant in (OFF, AUTO):
                own = {place: cpu_us(sides[place], variant, many) for place in order(turn)}
                take(CPU.format(stream_count, variant.name), turn, own)
    return found


def ratios_of(found: dict[str, list[list[float]]]) -> dict[str, Ratio]:
    """Returns by measurement this checkout over the other, turn by turn."""
    return {
        name: ratio_of([ours / theirs for theirs, ours in zip(*values, strict=True)]) for name, values in found.items()
    }


def table_of(found: dict[str, list[list[float]]], ratios: dict[str, Ratio]) -> Table:
    """A line per measurement."""
    table = Table(title="medians over turns")
    for name in ("", "other", "this", "this / other"):
        table.add_column(name, justify="right" if name else "left")
    for name, (theirs, ours) in found.items():
        shown = [f"{statistics.median(values):.3g}" for values in (theirs, ours)]
        table.add_row(name, *shown, str(ratios[name]))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.against", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="folder of another commit, with an environment in .venv")
    parser.add_argument("--turns", type=int, default=9, help="generations of each on each pair (%(default)s)")
    parser.add_argument("--stream-turns", type=int, default=4, help="blocks of streams of each (%(default)s)")
    parser.add_argument("--streams", type=int, default=STREAM_COUNT, help="streams of a block (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    asked = parser.parse_args()
    try:
        found = compared([python_of(asked.checkout), python_of(ROOT)], asked.turns, asked.stream_turns, asked.streams)
    except SpecdecError as error:
        print(f"against: {error}", file=sys.stderr)
        return 1
    ratios = ratios_of(found)
    Console(width=140).print(table_of(found, ratios))
    written: dict[str, Any] = {"cpu": processor_name(), "checkout": str(asked.checkout), "other_and_this": found}
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "against.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
