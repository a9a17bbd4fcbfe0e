"""`python -m bench.fleet`: the choice among draft models, and a draft with more sessions than it can serve.

Two models: a coordinator has two drafts, the first of which is always wrong, beside one that has the good draft alone;
then the good one is killed. One draft for four targets: the draft is a model as large as they are, and they are all in
use. Targets run on one core, coordinators, drafts and client on the other; `auto` has coordinators of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc

from bench.bars import Bar
from bench.placement import COORDINATOR_NICE, cores_of_machines
from bench.poor_drafts import write_always_wrong
from bench.results import Cell, Ratio, Results, Table
from bench.runner import Contender, Prepared, Values, main
from bench.streams import block_of, chosen_prompts, run_streams
from specdec.config import CoordinatorSettings, DraftSettings, ServiceSettings, TargetSettings
from specdec.launch.children import Child, start
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.deepened import write_deepened
from tests.support.harness import DRAFT_MODEL, heldout_prompts
from tests.support.network.machines import LOOPBACK, Machine
from tests.support.processes import set_priority
from tests.support.samples import measure
from tests.support.variants import AUTO as OF_DRAFT
from tests.support.variants import OFF, RULE_NAMES

AUTO = replace(OF_DRAFT, proposers=())  # the service's own: requests that name some measure no draft model
GOOD_ALONE = "auto with the good one alone"
TWO = "two draft models, the first always wrong"
LOST = "the same after the good one was killed"
SHARED = "one draft, as large as its four targets, 32 streams"
OVER = {TWO: (GOOD_ALONE, 0.97), LOST: (OFF.name, 0.98), SHARED: (OFF.name, 0.98)}  # what auto is beside, and its bar
RULE, TARGET_COUNT, STREAM_COUNT, MAX_TOKENS = RULE_NAMES[0], 4, 32, 96
TEXTS, QUICK_TEXTS = 32, 8  # before the two models are compared: by then both drafts are measured
REFUSALS = "specdec_draft_refusals_total "


def started(stack: ExitStack, role: str, settings: type[ServiceSettings], **values: Any) -> Child:
    """Starts a service on its core, stopped with `stack`, and returns it once it serves. Raises ConfigError."""
    common: dict[str, Any] = {"port": 0, "log_level": "error", "drain_grace_s": 1.0}
    if role != "coordinator":
        common["threads"] = 1
    with Machine(role, LOOPBACK, cores_of_machines()[0][role], None).inside():
        child = stack.enter_context(start(role, settings(**common, **values)))
    child.wait_ready()
    if role == "coordinator":
        set_priority(child.process.pid, COORDINATOR_NICE)
    return child


class TwoModels:
    """A target, a useless and a good draft, and coordinators with both, with the good one and with none."""

    def __init__(self, stack: ExitStack, target: Path, wrong: Path) -> None:
        main = started(stack, "target", TargetSettings, model=str(target), dtype="bfloat16").address
        poor, self.good = (
            started(stack, "draft", DraftSettings, model=str(folder), target_tokenizer=str(target))
            for folder in (wrong, DRAFT_MODEL)
        )
        drafts = {AUTO.name: (poor.address, self.good.address), GOOD_ALONE: (self.good.address,), OFF.name: ()}
        self._prompts, self._stubs = list(heldout_prompts().items()), {}
        for name, own in drafts.items():
            common = {"tokenizer": str(target), "target": main, "draft": own, "proposers": "draft"}
            address = started(stack, "coordinator", CoordinatorSettings, **common).address
            channel = stack.enter_context(grpc.insecure_channel(address))
            self._stubs[name] = pb_grpc.CoordinatorServiceStub(channel)

    def rate(self, name: str, turn: int) -> Values:
        """Measures one text through a coordinator."""
        variant, prompt = OFF if name == OFF.name else AUTO, self._prompts[turn % len(self._prompts)]
        return {"tokens_per_s": measure(self._stubs[name], variant, RULE, 0.0, prompt, MAX_TOKENS).tokens_per_s}


class SharedDraft:
    """Four targets and one draft of the same model, and coordinators for off and for auto."""

    def __init__(self, stack: ExitStack, model: Path, results: Results) -> None:
        own: dict[str, Any] = {"model": str(model), "dtype": "bfloat16"}
        targets = tuple(started(stack, "target", TargetSettings, **own).address for _ in range(TARGET_COUNT))
        draft = started(stack, "draft", DraftSettings, target_tokenizer=str(model), **own).address
        common: dict[str, Any] = {"tokenizer": str(model), "target": targets, "draft": draft, "proposers": "draft"}
        self._page, self._results = f"{LOOPBACK}:{free_port()}", results
        pages = {AUTO.name: {"metrics_address": self._page}, OFF.name: {}}
        self._addresses = {
            name: started(stack, "coordinator", CoordinatorSettings, **common, **page).address
            for name, page in pages.items()
        }

    def rate(self, name: str, turn: int) -> Values:
        """Measures all streams, and notes how many sessions the draft has refused."""
        variant, texts = AUTO if name == AUTO.name else OFF, chosen_prompts(turn, STREAM_COUNT)
        streams = asyncio.run(run_streams(self._addresses[name], variant, RULE, texts, MAX_TOKENS))
        self._results.notes["refused"] = refusals_on(self._page)
        return {"tokens_per_s": block_of(name, streams, 0.0).tokens_per_s}


def free_port() -> int:
    """Returns a port that nothing listens at now."""
    with socket.socket() as own:
        own.bind((LOOPBACK, 0))
        port: int = own.getsockname()[1]
    return port


def refusals_on(page: str) -> int:
    """Returns the sessions that drafts refused, by a coordinator's metrics."""
    with urllib.request.urlopen(f"http://{page}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return round(sum(float(line.split()[1]) for line in lines if line.startswith(REFUSALS)))


def ratio_of(results: Results, fleet: str) -> Ratio | None:
    return results.ratio({"fleet": fleet}, AUTO.name, OVER[fleet][0], "tokens_per_s")


class Fleet:
    """See the module."""

    name = "fleet"
    about = "auto with two draft models, without the better one, and with a draft beyond its capacity; loopback, GREEDY"
    turns, quick_turns, minutes = 15, 2, 8

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """None of its own."""

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        return [{"fleet": fleet} for fleet in OVER]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        with TemporaryDirectory() as scratch, ExitStack() as running:
            model = write_deepened(Path(scratch) / "target")
            two = TwoModels(running, model, write_always_wrong(Path(scratch) / "wrong"))

            def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
                fleet: TwoModels | SharedDraft = two
                if cell["fleet"] == TWO:
                    for turn in range(QUICK_TEXTS if asked.quick else TEXTS):
                        for name in (AUTO.name, GOOD_ALONE):
                            two.rate(name, turn)
                elif cell["fleet"] == LOST:
                    two.good.signal(signal.SIGKILL)
                else:
                    running.close()
                    fleet = SharedDraft(running, model, results)
                return {name: partial(fleet.rate, name) for name in (OVER[str(cell["fleet"])][0], AUTO.name)}

            yield contenders

    def tables(self, results: Results) -> list[Table]:
        def line(fleet: str) -> list[str]:
            other, bound = OVER[fleet]
            ratio = ratio_of(results, fleet)
            return [fleet, f"auto / {other}", ratio.short(bound) if ratio else "", f"{bound:g}"]

        return [Table("ratios", self.about, ["fleet", "ratio", "measured", "bar"], [line(fleet) for fleet in OVER])]

    def bars(self, results: Results) -> list[Bar]:
        found = {fleet: ratio_of(results, fleet) for fleet in OVER}
        ratios = [
            Bar(f"{fleet}: auto / {OVER[fleet][0]}", OVER[fleet][1], own.median if own else None, str(own or ""))
            for fleet, own in found.items()
        ]
        return [*ratios, Bar("sessions that the draft of four targets refused", 1.0, results.notes.get("refused"))]


BENCHMARK = Fleet()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
