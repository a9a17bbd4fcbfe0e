"""`python -m bench.overhead`: the cost of speculation across machines beside the models.

The time of a round beyond the target's forward pass and sampler, with models that compute nothing, on loopback, over
the echo of one stream message. The coordinator's CPU a token with many streams of the shipped pair, over that of a bare
grpc.aio server that streams messages of the same sizes at the same times to as many clients. Bytes a token on the
draft's link, by rule, for a streamed chain and a streamed tree on held-out prompts; the target is made deeper there,
since a slow target lets the draft run farther.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from bench.bare_server import BareServer, bare_server, echo_ms, read_replayed
from bench.bars import Bar, worst_of
from bench.placement import placed
from bench.results import Cell, Ratio, Results, Table, ratio_of, shown
from bench.runner import Contender, Prepared, Values, main
from bench.streams import PROMPT_CHARACTERS, Stream, run_block
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.deepened import write_deepened
from tests.support.harness import TARGET_MODEL, heldout_prompts, running
from tests.support.processes import cpu_seconds
from tests.support.samples import Sample, measure
from tests.support.table_models import table_models
from tests.support.variants import AUTO, CHAIN, NUCLEUS, OFF, RULES_DEFAULT, TREE, Variant

Contenders = Callable[[str], Mapping[str, Contender]]  # by rule

GREEDY = RULES_DEFAULT[0]
TABLE_PROMPT, ROUND_TOKENS, MAX_TOKENS = (0, "<1><2>"), 400, 64
STREAM_COUNT = 32
ROUND = "a round beyond forward and sampler, ms, over the echo of a message"
CPU = f"coordinator CPU a token, {STREAM_COUNT} streams, µs, over a bare gRPC server"
BYTES = "the draft's link"
OVER_MAX = {ROUND: {OFF.name: 5.0, AUTO.name: 6.0}, CPU: {OFF.name: 2.0, AUTO.name: 2.3}}
SENT = (CHAIN.name, TREE.name)
BYTES_MAX = {(CHAIN.name, False): 100, (CHAIN.name, True): 400, (TREE.name, False): 800, (TREE.name, True): 3500}


def beyond_ms(sample: Sample) -> float:
    """Milliseconds of a mean round beyond forward and sampler: waiting, queue, both links, messages, the rule."""
    rounds_per_token = (sample.rounds - 1) / max(1, sample.output_tokens - 1)  # the first is before the first token
    return 1e3 / sample.tokens_per_s / rounds_per_token - sample.forward_ms - sample.sampling_ms


@contextmanager
def rounds() -> Iterator[Contenders]:
    """Rounds of models that compute nothing, each text after the echo of a message."""
    with ExitStack() as stack:
        models = table_models(Path(stack.enter_context(TemporaryDirectory())))
        services = stack.enter_context(running(*models, threads=1, coordinator_count=2))
        channels = [stack.enter_context(grpc.insecure_channel(child.address)) for child in services.coordinators]
        stubs = dict(zip((AUTO, OFF), map(pb_grpc.CoordinatorServiceStub, channels), strict=True))
        server = stack.enter_context(bare_server())

        def beyond(variant: Variant, turn: int) -> Values:
            bare_ms = echo_ms(server)
            own_ms = beyond_ms(measure(stubs[variant], variant, GREEDY, 0.0, TABLE_PROMPT, ROUND_TOKENS))
            return {"cost": own_ms, "over": own_ms / bare_ms}

        yield lambda rule: {variant.name: partial(beyond, variant) for variant in (OFF, AUTO)}


@contextmanager
def streams() -> Iterator[Contenders]:
    """The coordinator's CPU a token, then that of a bare server for the same messages."""
    prompts = [prompt[:PROMPT_CHARACTERS] for prompt in heldout_prompts().values()][:STREAM_COUNT]
    with placed(TARGET_MODEL, "bfloat16", "float32") as place:
        with bare_server(place.network.machines["coordinator"].address) as server:

            def cpu(variant: Variant, turn: int) -> Values:
                block, own = run_block(place, variant, GREEDY, prompts, MAX_TOKENS)
                own_us = block.coordinator_us_per_token
                return {"cost": own_us, "over": own_us / bare_us_per_token(server, own)}

            yield lambda rule: {variant.name: partial(cpu, variant) for variant in (OFF, AUTO)}


def bare_us_per_token(server: BareServer, streams: Sequence[Stream]) -> float:
    """Microseconds of the bare server's CPU per token, with the messages these streams were sent."""
    began_s = min(stream.requested_s for stream in streams)
    schedules = [[(moment_s - began_s, size) for moment_s, size in stream.messages] for stream in streams]
    before_s = cpu_seconds(server.pid)
    asyncio.run(read_replayed(server.address, schedules))
    return (cpu_seconds(server.pid) - before_s) / sum(len(stream.token_ids) for stream in streams) * 1e6


@contextmanager
def links() -> Iterator[Contenders]:
    """What goes over the draft's link, payload both ways; a prompt each turn."""
    prompts = list(heldout_prompts().items())
    with TemporaryDirectory() as scratch, placed(write_deepened(Path(scratch)), "bfloat16", "float32") as place:

        def sent(variant: Variant, rule: str, turn: int) -> Values:
            prompt = prompts[turn % len(prompts)]
            sample = measure(place.stub_of(variant), variant, rule, 0.0, prompt, MAX_TOKENS)
            return {"bytes": sample.draft_bytes / MAX_TOKENS}

        yield lambda rule: {variant.name: partial(sent, variant, rule) for variant in (CHAIN, TREE)}


KINDS: dict[str, Callable[[], AbstractContextManager[Contenders]]] = {ROUND: rounds, CPU: streams, BYTES: links}


class Overhead:
    """See the module."""

    name = "overhead"
    about = "the cost beside the models: a round, the coordinator's CPU, bytes on the draft's link"
    turns, quick_turns, minutes = 9, 2, 10

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """None of its own."""

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        rules = (GREEDY, NUCLEUS) if asked.quick else (*RULES_DEFAULT, NUCLEUS)
        return [{"of": ROUND}, {"of": CPU}, *({"of": BYTES, "rule": rule} for rule in rules)]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        with ExitStack() as running:
            of: dict[str, Contenders] = {}

            def contenders(cell: Cell, results: Results) -> Mapping[str, Contender]:
                kind = str(cell["of"])
                if kind not in of:
                    running.close()
                    of[kind] = running.enter_context(KINDS[kind]())
                return of[kind](str(cell.get("rule", GREEDY)))

            yield contenders

    def tables(self, results: Results) -> list[Table]:
        names = [OFF.name, AUTO.name]
        costs = []
        for kind, bounds in OVER_MAX.items():
            what, unit, over = kind.rsplit(", ", 2)
            costs.append([f"{what}, {unit}", *(shown(results.median({"of": kind}, name, "cost")) for name in names)])
            ratios = {name: over_of(results, kind, name) for name in names}
            costs.append([over, *(own.short(bounds[name], True) if own else "" for name, own in ratios.items())])
        sent = [
            [
                str(cell["rule"]),
                *(shown(results.median(cell, name, "bytes"), bound_of(cell, name), True) for name in SENT),
            ]
            for cell in results.cells(of=BYTES)
        ]
        return [
            Table("cost", f"{self.about} (bars 5 and 6, 2.0 and 2.3)", ["", *names], costs),
            Table(
                "bytes", "bytes a token on the draft's link (bars: ids 100, 800, top-p 400, 3,500)", ["", *SENT], sent
            ),
        ]

    def bars(self, results: Results) -> list[Bar]:
        bars = []
        for kind, bounds in OVER_MAX.items():
            for name, bound in bounds.items():
                ratio = over_of(results, kind, name)
                bars.append(
                    Bar(f"{kind}: {name}", bound, ratio.median if ratio else None, str(ratio or ""), is_limit=True)
                )
        for (name, is_drawn), bound in BYTES_MAX.items():
            cells = [cell for cell in results.cells(of=BYTES) if bound_of(cell, name) == bound]
            values = {str(cell["rule"]): results.median(cell, name, "bytes") or 0.0 for cell in cells}
            claim = f"bytes a token on the draft's link, {name}, {'top-p' if is_drawn else 'ids'}"
            bars.append(worst_of(claim, bound, values, is_limit=True, stretch=bound / 2))
        return bars


def over_of(results: Results, kind: str, name: str) -> Ratio | None:
    """A cost over its baseline; None where it was not measured."""
    values = results.samples({"of": kind}).get(name, {}).get("over")
    return ratio_of(values) if values else None


def bound_of(cell: Cell, name: str) -> float | None:
    """The bar of a rule that sends ids, or truncated distributions; whole distributions have none."""
    rule = str(cell["rule"])
    return BYTES_MAX[name, rule == NUCLEUS] if rule == NUCLEUS or "REJECTION" not in rule else None


BENCHMARK = Overhead()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
