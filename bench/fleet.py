"""`python -m bench.fleet`: the choice among draft models, and a draft with more sessions than it can serve.

Two models: a coordinator has two drafts, the first of which is always wrong, beside one that has the good draft alone;
then the good one is killed. One draft for four targets: the draft is a model as large as they are, and they are all in
use. Targets run on one core, coordinators, drafts and client on the other; variants in turns, `auto` on coordinators of
its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import Progress

from bench.bars import Bar, add_check_flag, as_json, conclude
from bench.concurrency import chosen_prompts
from bench.deepened import EXTRA_LAYERS_DEFAULT, write_deepened
from bench.pipeline.placement import COORDINATOR_NICE, cores_of_machines, processor_name
from bench.pipeline.samples import measure
from bench.pipeline.variants import AUTO as OF_DRAFT
from bench.pipeline.variants import OFF, RULES_DEFAULT
from bench.poor_drafts import write_always_wrong
from bench.results import Ratio, ratio_of
from bench.streams import block_of, run_streams
from specdec.config import CoordinatorSettings, DraftSettings, ServiceSettings, TargetSettings
from specdec.errors import SpecdecError
from specdec.launch.children import Child, start
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.harness import DRAFT_MODEL, heldout_prompts
from tests.support.network.machines import LOOPBACK, Machine
from tests.support.processes import set_priority

AUTO = replace(OF_DRAFT, proposers=())  # the service's own: requests that name some measure no draft model
OF_GOOD, OF_OFF = 0.97, 0.98
TARGET_COUNT = 4
REFUSALS = "specdec_draft_refusals_total "
QUICK = {"pairs": 3, "texts": 16, "max_tokens": 48}
BOTH, GOOD, NONE = "both", "good", "none"  # the drafts of a coordinator


class Started:
    """Services on cores of their own, stopped with `stack`."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._cores, _ = cores_of_machines()

    def __call__(self, role: str, settings: type[ServiceSettings], **values: Any) -> Child:
        """Starts a service and returns it once it serves. Raises ConfigError."""
        common: dict[str, Any] = {"port": 0, "log_level": "error", "drain_grace_s": 1.0}
        with Machine(role, LOOPBACK, self._cores[role], None).inside():
            child = self._stack.enter_context(start(role, settings(**common, **values)))
        child.wait_ready()
        if role == "coordinator":
            set_priority(child.process.pid, COORDINATOR_NICE)
        return child


def compared(rate: Callable[[str, int], float], names: tuple[str, str], pairs: int, done: Callable[[], None]) -> Ratio:
    """The first over the second, in turns."""
    ratios = []
    for number in range(pairs):
        own = {name: rate(name, number) for name in (names if number % 2 else names[::-1])}
        ratios.append(own[names[0]] / own[names[1]])
        done()
    return ratio_of(ratios)


def two_models(
    asked: argparse.Namespace, model: Path, wrong: Path, done: Callable[[], None]
) -> Iterator[tuple[str, Ratio]]:
    """Both drafts beside the good one alone, and, once that is killed, beside none."""
    rule = RULES_DEFAULT[asked.rule]
    prompts = list(heldout_prompts().items())
    with contextlib.ExitStack() as stack:
        started = Started(stack)
        engine = {"threads": 1}
        target = started("target", TargetSettings, model=str(model), dtype=asked.dtype, **engine).address
        told = {"target_tokenizer": str(model), **engine}
        poor, good = (started("draft", DraftSettings, model=str(folder), **told) for folder in (wrong, DRAFT_MODEL))
        drafts = {BOTH: (poor.address, good.address), GOOD: (good.address,), NONE: ()}
        stubs = {}
        for name, own in drafts.items():
            common = {"tokenizer": str(model), "target": target, "draft": own, "proposers": "draft"}
            coordinator = started("coordinator", CoordinatorSettings, **common)
            channel = stack.enter_context(grpc.insecure_channel(coordinator.address))
            stubs[name] = pb_grpc.CoordinatorServiceStub(channel)

        def rate(name: str, number: int) -> float:
            variant, prompt = OFF if name == NONE else AUTO, prompts[number % len(prompts)]
            return measure(stubs[name], variant, rule, 0.0, prompt, asked.max_tokens).tokens_per_s

        for number in range(asked.texts):  # until both drafts are measured
            for name in (BOTH, GOOD):
                rate(name, number)
        yield (
            "two draft models, one always wrong: auto / auto with the good one alone",
            compared(rate, (BOTH, GOOD), asked.pairs, done),
        )
        good.signal(signal.SIGKILL)
        yield "after the loss of the good one: auto / off", compared(rate, (BOTH, NONE), asked.pairs, done)


def beyond_capacity(asked: argparse.Namespace, model: Path, done: Callable[[], None]) -> tuple[Ratio, int]:
    """Auto / off through four targets and one draft, and the sessions that the draft refused."""
    rule = RULES_DEFAULT[asked.rule]
    with contextlib.ExitStack() as stack:
        started = Started(stack)
        own: dict[str, Any] = {"model": str(model), "threads": 1, "dtype": asked.dtype}
        targets = tuple(started("target", TargetSettings, **own).address for _ in range(TARGET_COUNT))
        draft = started("draft", DraftSettings, target_tokenizer=str(model), **own).address
        common: dict[str, Any] = {"tokenizer": str(model), "target": targets, "draft": draft, "proposers": "draft"}
        page = f"{LOOPBACK}:{free_port()}"
        pages = {AUTO.name: {"metrics_address": page}, OFF.name: {}}
        addresses = {
            name: started("coordinator", CoordinatorSettings, **common, **own).address for name, own in pages.items()
        }

        def rate(name: str, number: int) -> float:
            variant = AUTO if name == AUTO.name else OFF
            texts = chosen_prompts(number, asked.streams)
            streams = asyncio.run(run_streams([addresses[name]], variant, rule, texts, asked.max_tokens))
            return block_of(name, streams, 0.0).tokens_per_s

        for name in addresses:
            rate(name, 0)
        ratio = compared(rate, (AUTO.name, OFF.name), asked.pairs, done)
        return ratio, refusals_on(page)


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


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rule", type=int, default=0, help="by number, as bench.pipeline lists them (%(default)s)")
    parser.add_argument("--pairs", type=int, default=15, help="of each comparison, in turns (%(default)s)")
    parser.add_argument("--texts", type=int, default=32, help="before the two models are compared (%(default)s)")
    parser.add_argument("--streams", type=int, default=32, help="at once through four targets (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="output tokens of a generation (%(default)s)")
    parser.add_argument("--extra-layers", type=int, default=EXTRA_LAYERS_DEFAULT, help="of the target (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of the target of the two models (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="about two minutes: three pairs")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    add_check_flag(parser)
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args()


def bars_of(ratios: Sequence[tuple[str, float, Ratio]], refusal_count: int) -> list[Bar]:
    """Medians against their bars; and a draft that was beyond its capacity at all."""
    bars = [Bar(claim, bound, ratio.median, str(ratio)) for claim, bound, ratio in ratios]
    return [*bars, Bar("sessions that the draft of four targets refused", 1.0, float(refusal_count))]


def main() -> int:
    asked = options()
    console = Console(width=150)
    found: list[tuple[str, float, Ratio]] = []
    try:
        with tempfile.TemporaryDirectory() as scratch, Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("measuring", total=3 * asked.pairs)
            model = write_deepened(Path(scratch) / "target", asked.extra_layers)
            wrong = write_always_wrong(Path(scratch) / "wrong")
            for bound, (claim, ratio) in zip(
                (OF_GOOD, OF_OFF), two_models(asked, model, wrong, lambda: bar.advance(task))
            ):
                found.append((claim, bound, ratio))
            ratio, refusal_count = beyond_capacity(asked, model, lambda: bar.advance(task))
            found.append(("one draft for four targets, beyond its capacity: auto / off", OF_OFF, ratio))
    except SpecdecError as error:
        print(f"fleet: {error}", file=sys.stderr)
        return 1
    bars = bars_of(found, refusal_count)
    asked.out.mkdir(parents=True, exist_ok=True)
    written: dict[str, Any] = {"cpu": processor_name(), "rule": RULES_DEFAULT[asked.rule], "streams": asked.streams}
    written |= {"ratios": {claim: asdict(ratio) for claim, _, ratio in found}, "bars": as_json(bars)}
    (asked.out / "fleet.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
