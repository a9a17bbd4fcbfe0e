"""`python -m bench.overhead`: what speculating across machines costs beside the models.

Three counts: what a round takes beyond the target's forward and evidence, with models that compute nothing, on
loopback; the coordinator's CPU per committed token with many streams; bytes on the draft link and nodes the draft
evaluates per committed token, by rule, for a streamed chain and a streamed tree, on the shipped pair and held-out
prompts. The last on a target as slow as one worth speculating for, since a slow target lets the draft run farther.
"""

from __future__ import annotations

import argparse
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

from bench import concurrency
from bench.deepened import EXTRA_LAYERS_DEFAULT, write_deepened
from bench.harness import TARGET_MODEL, heldout_prompts, running
from bench.pipeline.figures import figures_of
from bench.pipeline.placement import Placed, description, placed
from bench.pipeline.samples import Sample, measure
from bench.pipeline.variants import AUTO, CHAIN, NUCLEUS, OFF, RULES_DEFAULT, TREE, Variant, synchronous
from bench.rounds import table_models
from specdec.errors import SpecdecError
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc

GREEDY = RULES_DEFAULT[0]
ROUND_VARIANTS = (OFF, synchronous(4), CHAIN, TREE, AUTO)
STREAM_VARIANTS = (OFF, CHAIN, TREE, AUTO)
WIRE_RULES = (*RULES_DEFAULT, NUCLEUS)
STREAM_COUNT = 32
TABLE_PROMPT = (0, "<1><2>")


def track_quietly(items: Sequence[Any], what: str) -> Iterator[Any]:
    return iter(track(items, what, console=Console(stderr=True)))


def beyond_ms(sample: Sample) -> float:
    """Milliseconds of a mean round beyond forward and evidence: waiting, queue, both links, messages, the rule."""
    rounds_per_token = (sample.rounds - 1) / max(
        1, sample.output_tokens - 1
    )  # the first round is before the first token
    round_ms = 1e3 / sample.tokens_per_s / rounds_per_token
    return round_ms - sample.forward_ms - sample.evidence_ms


def rounds_beyond(repeats: int, max_tokens: int) -> dict[str, float]:
    """Median over generations by variant, in milliseconds; table models, three processes on loopback."""
    found: dict[str, list[float]] = {variant.name: [] for variant in ROUND_VARIANTS}
    with contextlib.ExitStack() as stack:
        models = table_models(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        services = stack.enter_context(running(*models, threads=1))
        channel = stack.enter_context(grpc.insecure_channel(services.coordinator.address))
        stub = pb_grpc.CoordinatorServiceStub(channel)
        for _ in track_quietly(range(repeats + 1), "a round"):
            for variant in ROUND_VARIANTS:
                found[variant.name].append(beyond_ms(measure(stub, variant, GREEDY, 0.0, TABLE_PROMPT, max_tokens)))
    return {name: statistics.median(values[1:]) for name, values in found.items()}  # the first of each warms up


def cpu_per_token(repeats: int, max_tokens: int) -> dict[str, dict[str, float]]:
    """Microseconds of the coordinator's CPU per committed token by variant, and tokens/s; the shipped pair."""
    found: dict[str, list[concurrency.Block]] = {variant.name: [] for variant in STREAM_VARIANTS}
    prompts = [prompt[: concurrency.PROMPT_CHARACTERS] for prompt in heldout_prompts().values()][:STREAM_COUNT]
    with placed(TARGET_MODEL, "bfloat16", "float32") as place:
        for _ in track_quietly(range(repeats), f"{STREAM_COUNT} streams"):
            for variant in STREAM_VARIANTS:
                found[variant.name].append(concurrency.measure(place, variant, GREEDY, prompts, max_tokens))
    return {name: concurrency.median_block(blocks) for name, blocks in found.items()}


def on_the_wire(place: Placed, rtt_ms: float, prompt_count: int, max_tokens: int) -> dict[str, dict[str, Any]]:
    """Bytes and evaluated leaves per committed token by rule and streamed variant."""
    place.set_rtt(rtt_ms, 0.2)
    prompts = list(heldout_prompts().items())[:prompt_count]
    found: dict[str, dict[str, Any]] = {}
    for rule in track_quietly(WIRE_RULES, f"wire at {rtt_ms:g} ms"):
        samples: dict[Variant, list[Sample]] = {CHAIN: [], TREE: []}
        for prompt in prompts:
            for variant, own in samples.items():
                own.append(measure(place.stub, variant, rule, rtt_ms, prompt, max_tokens))
        found[rule] = {variant.name: wire_figures(own) for variant, own in samples.items()}
    return found


def wire_figures(samples: Sequence[Sample]) -> dict[str, float]:
    tokens = sum(sample.output_tokens for sample in samples)
    figures = figures_of(samples)
    return {
        "bytes_per_token": figures.draft_bytes_per_token,
        "leaves_per_token": figures.leaves_per_token,
        "branch_leaves_per_token": sum(sample.branch_leaves for sample in samples) / tokens,
        "target_bytes_per_token": sum(sample.target_bytes for sample in samples) / tokens,
        "acceptance": figures.acceptance,
        "hit_rate": figures.hit_rate,
    }


def wire_table(found: dict[str, dict[str, dict[str, float]]], rtt_ms: float) -> Table:
    """A line per rule and variant."""
    table = Table(title=f"per committed token, payload both ways; round trip to the draft {rtt_ms:g} ms")
    for name in ("rule", "", "draft link B", "leaves", "branch heads", "target link B", "acceptance", "hits"):
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
    parser.add_argument("--repeats", type=int, default=9, help="generations of each variant on table models")
    parser.add_argument("--stream-repeats", type=int, default=3, help="blocks of 32 streams of each variant")
    parser.add_argument("--prompts", type=int, default=6, help="held-out prompts on the wire (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens of a generation (%(default)s)")
    parser.add_argument("--rtt-ms", type=float, default=0.0, help="coordinator-draft, on the wire (%(default)s)")
    parser.add_argument("--extra-layers", type=int, default=EXTRA_LAYERS_DEFAULT, help="of the target (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    return parser.parse_args()


def main() -> int:
    asked = options()
    console = Console(width=140)
    try:
        round_ms = rounds_beyond(asked.repeats, 400)
        console.print(line_table("a round beyond forward and evidence, loopback, p50, ms", round_ms, ".2f"))
        blocks = cpu_per_token(asked.stream_repeats, asked.max_tokens)
        cpu_us = {name: block["coordinator_us_per_token"] for name, block in blocks.items()}
        console.print(line_table(f"coordinator CPU per committed token, {STREAM_COUNT} streams, µs", cpu_us, ".0f"))
        with tempfile.TemporaryDirectory() as scratch:
            model = write_deepened(Path(scratch), asked.extra_layers)
            with placed(model, "bfloat16", "float32") as place:
                hardware = description(place)
                wire = on_the_wire(place, asked.rtt_ms, asked.prompts, asked.max_tokens)
        console.print(wire_table(wire, asked.rtt_ms))
        console.print(json.dumps(hardware), highlight=False, soft_wrap=True)
    except SpecdecError as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 1
    bytes_per_token = {rule: {name: own["bytes_per_token"] for name, own in by.items()} for rule, by in wire.items()}
    written = {
        "round_ms": round_ms,
        "cpu_us_per_token": cpu_us,
        "bytes_per_token": bytes_per_token,
        "streams": blocks,
        "wire": wire,
        "rtt_ms": asked.rtt_ms,
        "hardware": hardware,
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "overhead.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
