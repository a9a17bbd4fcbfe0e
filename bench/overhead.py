"""`python -m bench.overhead`: the cost of speculation across machines beside the models.

Three measurements: the time of a round beyond the target's forward pass and sampler, with models that compute nothing,
on loopback, beside the echo of one stream message; the coordinator's CPU per committed token with many streams, beside
a bare grpc.aio server that streams messages of the same sizes at the same times to as many clients; bytes on the draft
link and evaluated nodes per committed token, by rule, for a streamed chain and a streamed tree, on the shipped pair and
held-out prompts. The last with a realistically slow target, since a slow target lets the draft run farther.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.bare_server import BareServer, bare_server, echo_ms, read_replayed
from bench.bars import Bar, add_check_flag, as_json, conclude, worst_of
from bench.deepened import EXTRA_LAYERS_DEFAULT, write_deepened
from bench.pipeline.measurements import measurements_of
from bench.pipeline.placement import Placed, placed, processor_name
from bench.pipeline.samples import Sample, measure
from bench.pipeline.variants import AUTO, CHAIN, NUCLEUS, OFF, RULES_DEFAULT, TREE, Variant, synchronous
from bench.results import Ratio, ratio_of
from bench.rounds import table_models
from bench.streams import PROMPT_CHARACTERS, Block, Stream, median_block, run_block
from specdec.errors import SpecdecError
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.harness import TARGET_MODEL, heldout_prompts, running
from tests.support.processes import cpu_seconds

GREEDY = RULES_DEFAULT[0]
ROUND_VARIANTS = (OFF, synchronous(4), CHAIN, TREE, AUTO)
STREAM_VARIANTS = (OFF, CHAIN, TREE, AUTO)
WIRE_RULES = (*RULES_DEFAULT, NUCLEUS)
BARE_VARIANTS = (OFF, AUTO)
STREAM_COUNT = 32
ECHO = "echo"
WIRE_BOUNDS = {("chain", False): 100, ("chain", True): 400, ("tree", False): 800, ("tree", True): 3500}
ROUND_BOUNDS, CPU_BOUNDS = {"off": 5.0, "auto": 6.0}, {"off": 2.0, "auto": 2.3}
TABLE_PROMPT = (0, "<1><2>")


def track_quietly(items: Sequence[Any], what: str) -> Iterator[Any]:
    return iter(track(items, what, console=Console(stderr=True)))


def beyond_ms(sample: Sample) -> float:
    """Milliseconds of a mean round beyond forward and sampler: waiting, queue, both links, messages, the rule."""
    rounds_per_token = (sample.rounds - 1) / max(
        1, sample.output_tokens - 1
    )  # the first round is before the first token
    round_ms = 1e3 / sample.tokens_per_s / rounds_per_token
    return round_ms - sample.forward_ms - sample.sampling_ms


def rounds_beyond(repeats: int, max_tokens: int) -> tuple[dict[str, float], dict[str, Ratio]]:
    """Median milliseconds over generations by variant and of an echo, and their ratios to the echo of the same turn;
    table models, three processes on loopback."""
    found: dict[str, list[float]] = {name: [] for name in (*(variant.name for variant in ROUND_VARIANTS), ECHO)}
    with contextlib.ExitStack() as stack:
        models = table_models(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        services = stack.enter_context(running(*models, threads=1, coordinator_count=2))
        channels = [stack.enter_context(grpc.insecure_channel(child.address)) for child in services.coordinators]
        own, others = map(pb_grpc.CoordinatorServiceStub, channels)
        server = stack.enter_context(bare_server())
        for _ in track_quietly(range(repeats + 1), "a round"):
            found[ECHO].append(echo_ms(server))
            for variant in ROUND_VARIANTS:
                stub = own if variant == AUTO else others
                found[variant.name].append(beyond_ms(measure(stub, variant, GREEDY, 0.0, TABLE_PROMPT, max_tokens)))
    kept = {name: values[1:] for name, values in found.items()}  # the first of each warms up
    ratios = {name: ratio_of([ms / echo for ms, echo in zip(own, kept[ECHO])]) for name, own in kept.items()}
    return {name: statistics.median(values) for name, values in kept.items()}, ratios


def cpu_per_token(repeats: int, max_tokens: int) -> tuple[dict[str, dict[str, float]], dict[str, Ratio]]:
    """Returns the measurements of blocks by variant, with the coordinator's CPU per committed token; and the ratios of
    this to the CPU of the bare server with the messages of the same block. The shipped pair."""
    found: dict[str, list[Block]] = {variant.name: [] for variant in STREAM_VARIANTS}
    ratios: dict[str, list[float]] = {variant.name: [] for variant in BARE_VARIANTS}
    prompts = [prompt[:PROMPT_CHARACTERS] for prompt in heldout_prompts().values()][:STREAM_COUNT]
    with placed(TARGET_MODEL, "bfloat16", "float32") as place:
        with bare_server(place.network.machines["coordinator"].address) as server:
            for _ in track_quietly(range(repeats), f"{STREAM_COUNT} streams"):
                for variant in STREAM_VARIANTS:
                    block, streams = run_block(place, variant, GREEDY, prompts, max_tokens)
                    found[variant.name].append(block)
                    if variant in BARE_VARIANTS:
                        bare_us = bare_us_per_token(server, streams)
                        ratios[variant.name].append(block.coordinator_us_per_token / bare_us)
    measurements = {name: median_block(blocks) for name, blocks in found.items()}
    return measurements, {name: ratio_of(values) for name, values in ratios.items()}


def bare_us_per_token(server: BareServer, streams: Sequence[Stream]) -> float:
    """Microseconds of the bare server's CPU per token, with the messages these streams were sent."""
    began_s = min(stream.requested_s for stream in streams)
    schedules = [[(moment_s - began_s, size) for moment_s, size in stream.messages] for stream in streams]
    before_s = cpu_seconds(server.pid)
    asyncio.run(read_replayed(server.address, schedules))
    return (cpu_seconds(server.pid) - before_s) / sum(len(stream.token_ids) for stream in streams) * 1e6


def bars_of(round_ratios: dict[str, Ratio], cpu_ratios: dict[str, Ratio]) -> list[Bar]:
    """Of plain decoding and of the policy's own choice."""
    claims = (
        "round beyond forward and sampler / echo of a message",
        "coordinator CPU a token / bare server, 32 streams",
    )
    found = zip(claims, (round_ratios, cpu_ratios), (ROUND_BOUNDS, CPU_BOUNDS), strict=True)
    return [
        Bar(f"{claim}, {name}", bound, ratios[name].median, str(ratios[name]), is_limit=True)
        for claim, ratios, bounds in found
        for name, bound in bounds.items()
    ]


def wire_bars(wire: dict[str, dict[str, dict[str, float]]]) -> list[Bar]:
    """Bars of bytes per committed token on the draft link, of a chain and a tree, with and without distributions."""
    bars = []
    for (variant, is_drawn), bound in WIRE_BOUNDS.items():
        rules = [rule for rule in wire if (rule == NUCLEUS if is_drawn else "REJECTION" not in rule)]
        claim = f"bytes a token on the draft link, {variant}, {NUCLEUS if is_drawn else 'ids'}"
        values = {rule: wire[rule][variant]["bytes_per_token"] for rule in rules}
        bars.append(worst_of(claim, bound, values, is_limit=True, stretch=bound / 2))
    return bars


def on_the_wire(place: Placed, rtt_ms: float, prompt_count: int, max_tokens: int) -> dict[str, dict[str, Any]]:
    """Returns bytes and evaluated nodes per committed token by rule and streamed variant."""
    place.set_rtt(rtt_ms, 0.2)
    prompts = list(heldout_prompts().items())[:prompt_count]
    found: dict[str, dict[str, Any]] = {}
    for rule in track_quietly(WIRE_RULES, f"wire at {rtt_ms:g} ms"):
        samples: dict[Variant, list[Sample]] = {CHAIN: [], TREE: []}
        for prompt in prompts:
            for variant, own in samples.items():
                own.append(measure(place.stub_of(variant), variant, rule, rtt_ms, prompt, max_tokens))
        found[rule] = {variant.name: wire_measurements(own) for variant, own in samples.items()}
    return found


def wire_measurements(samples: Sequence[Sample]) -> dict[str, float]:
    tokens = sum(sample.output_tokens for sample in samples)
    measurements = measurements_of(samples)
    return {
        "bytes_per_token": measurements.draft_bytes_per_token,
        "nodes_per_token": measurements.nodes_per_token,
        "branch_nodes_per_token": sum(sample.branch_nodes for sample in samples) / tokens,
        "target_bytes_per_token": sum(sample.target_bytes for sample in samples) / tokens,
        "acceptance": measurements.acceptance,
        "hit_rate": measurements.hit_rate,
    }


def wire_table(found: dict[str, dict[str, dict[str, float]]], rtt_ms: float) -> Table:
    """A line per rule and variant."""
    table = Table(title=f"per committed token, payload both ways; round trip to the draft {rtt_ms:g} ms")
    for name in ("rule", "", "draft link B", "nodes", "branch nodes", "target link B", "acceptance", "hits"):
        table.add_column(name, justify="left" if name in ("rule", "") else "right")
    for rule, variants in found.items():
        for name, own in variants.items():
            formats = (".0f", ".1f", ".1f", ".0f", ".2f", ".2f")
            columns = [format(value, form) for value, form in zip(own.values(), formats, strict=True)]
            table.add_row(rule, name, *columns)
        table.add_section()
    return table


def line_table(title: str, values: dict[str, float], form: str) -> Table:
    """One line."""
    table = Table(title=title)
    for name in values:
        table.add_column(name, justify="right")
    table.add_row(*(format(value, form) for value in values.values()))
    return table


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="generations of each on table models (%(default)s)")
    parser.add_argument("--stream-repeats", type=int, default=5, help="blocks of 32 streams of each (%(default)s)")
    parser.add_argument("--prompts", type=int, default=6, help="held-out prompts on the wire (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens of a generation (%(default)s)")
    parser.add_argument("--rtt-ms", type=float, default=0.0, help="coordinator-draft, on the wire (%(default)s)")
    parser.add_argument("--extra-layers", type=int, default=EXTRA_LAYERS_DEFAULT, help="of the target (%(default)s)")
    parser.add_argument("--without-wire", action="store_true", help="leave bytes and nodes per token out")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    add_check_flag(parser)
    return parser.parse_args()


def measure_wire(asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """`on_the_wire` on services of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        model = write_deepened(Path(scratch), asked.extra_layers)
        with placed(model, "bfloat16", "float32") as place:
            return on_the_wire(place, asked.rtt_ms, asked.prompts, asked.max_tokens)


def main() -> int:
    asked = options()
    console = Console(width=140)
    try:
        round_ms, round_ratios = rounds_beyond(asked.repeats, 400)
        console.print(line_table("a round beyond forward and sampler, loopback, p50, ms", round_ms, ".2f"))
        blocks, cpu_ratios = cpu_per_token(asked.stream_repeats, asked.max_tokens)
        cpu_us = {name: block["coordinator_us_per_token"] for name, block in blocks.items()}
        console.print(line_table(f"coordinator CPU per committed token, {STREAM_COUNT} streams, µs", cpu_us, ".0f"))
        wire = {} if asked.without_wire else measure_wire(asked)
        if wire:
            console.print(wire_table(wire, asked.rtt_ms))
    except SpecdecError as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 1
    bars = [*bars_of(round_ratios, cpu_ratios), *wire_bars(wire)]
    written = {
        "cpu": processor_name(),
        "round_ms": round_ms,
        "cpu_us_per_token": cpu_us,
        "streams": blocks,
        "wire": wire,
        "rtt_ms": asked.rtt_ms,
        "bars": as_json(bars),
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "overhead.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
