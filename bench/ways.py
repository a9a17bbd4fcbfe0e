"""`python -m bench.ways`: what a request walks through in the product's own code, and what it holds.

The three services run in this process, and the interpreter tells of every call. Of two ways, from a request's arrival
to its first delta, and of one verification round, it counts the product's functions, their files, and how often a
reader who follows them changes the file or returns to one left before. Of a running request it counts the mutable
objects that belong to it alone, and their fields. It knows of the coordinator the service's entry point, its messages,
and the class `Generation`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest import mock

import grpc
import torch
from rich.console import Console
from rich.table import Table

from bench.holdings import ROOT, Holding, holdings, is_own_kind, is_product
from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.coordinator.service import run as run_coordinator
from specdec.draft_service.service import run as run_draft
from specdec.engine.interface import RaggedBatch, StepOutput
from specdec.engine.table_model import TableModel, write_table_model
from specdec.errors import SpecdecError
from specdec.target_service.service import run as run_target
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from specdec.v1 import types_pb2 as types_pb

UNNAMED = ("<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # parts of a function, or an import
FIRST_DELTA, AUTO_ROUND, OFF_ROUND = "to the first delta", "one round, auto", "one round, off"
PLANS = {AUTO_ROUND: pb.POLICY_AUTO, OFF_ROUND: pb.POLICY_OFF}
COMMON: dict[str, Any] = {"port": 0, "log_level": "error", "drain_grace_s": 1.0}
COLLECTOR = "http://127.0.0.1:9"  # nothing listens there: spans are recorded and dropped
PAUSE_S = 0.2  # between two texts, for what the first leaves behind
WARM_TEXTS = {AUTO_ROUND: 3, OFF_ROUND: 1}  # the first imports, and the policy needs two to speculate
STEADY_ROUND = 12  # the rounds from this one on are counted: by then the draft is ahead and the policy has its times
PROMPT, VOCABULARY_SIZE, POSITIONS_MAX = "<1><2>", 7, 512
STEP_S = 0.02  # of the target: the draft's part before each of its results is done, so no race decides what is counted
DRAFT_ERROR = 0.7  # the standard deviation of the draft's logits from the target's, which vary by 2
MAX_TOKENS = 480  # of a text, which is left once it had the rounds


class Place(NamedTuple):
    """A function of the product: its file below the checkout, and its qualified name."""

    file: str
    name: str


class Size(NamedTuple):
    """The size of a way. `switches`: consecutive functions in different files, in the order in which each thread calls
    them for the first time; `returns`: those of them to a file left before. `calls`: resumed coroutines included."""

    functions: float
    files: float
    switches: float
    returns: float
    calls: float


class Tracer:
    """The calls of product functions in all threads begun after it, and the moments between which they count.

    `calls`: thread and function of each. `first_delta`, `results`: the number of calls before the first delta was
    ready, and before each verification result arrived at the coordinator. One request at a time.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.calls: list[tuple[int, Place]] = []
        self.first_delta: int | None = None
        self.results: dict[int, int] = {}  # by round
        self._places: dict[CodeType, Place | None] = {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Forgets what was counted, and counts inside."""
        self.calls, self.first_delta, self.results = [], None, {}
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Hears of the calls of this thread, and of those begun inside."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, value: Any) -> None:
        if not self.is_on or event not in ("call", "return"):
            return
        code = frame.f_code
        if code not in self._places:
            is_counted = code.co_name not in UNNAMED and is_product(code.co_filename)
            file = Path(code.co_filename).resolve()
            self._places[code] = Place(str(file.relative_to(ROOT)), code.co_qualname) if is_counted else None
        place = self._places[code]
        if place is None:
            return
        if event == "call":
            self.calls.append((threading.get_ident(), place))
        elif value is not None:
            self._on_value(value)

    def _on_value(self, value: Any) -> None:
        """Takes the moments from what product functions return: only the coordinator makes these of a message, and
        messages of these."""
        name = type(value).__name__
        if name == "GenerateResponse" and self.first_delta is None and value.HasField("delta"):
            self.first_delta = len(self.calls)
        elif name == "VerificationResult":
            self.results.setdefault(value.round_index, len(self.calls))

    def to_first_delta(self) -> Sequence[tuple[int, Place]]:
        """Returns the calls until the first delta was ready. Raises SpecdecError where no function returned one."""
        if self.first_delta is None:
            raise SpecdecError("no product function returned a GenerateResponse with a delta")
        return self.calls[: self.first_delta]

    def rounds(self, count: int) -> list[Sequence[tuple[int, Place]]]:
        """Returns the calls of `count` rounds in steady state, each from the arrival of a result to that of the next.
        Raises SpecdecError where there were too few."""
        moments = [self.results[index] for index in sorted(self.results)][STEADY_ROUND:]
        if len(moments) <= count:
            raise SpecdecError(f"the text had {len(self.results)} rounds, {STEADY_ROUND + count + 1} are needed")
        return [self.calls[begin:end] for begin, end in zip(moments, moments[1 : count + 1])]


def size_of(calls: Sequence[tuple[int, Place]]) -> Size:
    """Returns the size of a way."""
    firsts: dict[int, dict[Place, None]] = {}
    for thread, place in calls:
        firsts.setdefault(thread, {})[place] = None
    switches = returns = 0
    for places in firsts.values():
        files = [place.file for place in places]
        left: set[str] = set()
        for before, after in zip(files, files[1:]):
            if before != after:
                left.add(before)
                switches += 1
                returns += after in left
    functions = {place for _, place in calls}
    return Size(len(functions), len({place.file for place in functions}), switches, returns, len(calls))


@contextlib.asynccontextmanager
async def serving(service: Callable[..., Coroutine[Any, Any, None]], settings: object) -> AsyncIterator[str]:
    """A service on this event loop; its address. Raises what the service raises before it is ready."""
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(service(settings, address.set_result))
    both: set[asyncio.Future[Any]] = {task, address}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    try:
        if not address.done():
            await task
        yield address.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def write_pair(folder: Path) -> tuple[str, str]:
    """Writes table models of a target and of a draft that is right most of the time; returns their folders."""
    generator, shape = torch.Generator().manual_seed(1), (VOCABULARY_SIZE + 1, VOCABULARY_SIZE + 1, VOCABULARY_SIZE)
    target = 2 * torch.randn(shape, generator=generator)
    draft = target + DRAFT_ERROR * torch.randn(shape, generator=generator)
    for name, logits in (("target", target), ("draft", draft)):
        write_table_model(folder / name, VOCABULARY_SIZE, POSITIONS_MAX, logits=logits)
    return str(folder / "target"), str(folder / "draft")


@contextlib.contextmanager
def slow_target() -> Iterator[None]:
    """Every forward pass of the table model that computes first inside takes STEP_S."""
    forward, target = TableModel.forward, list[TableModel]()

    def slow_forward(model: TableModel, batch: RaggedBatch) -> StepOutput:
        if not target:
            target.append(model)
        if model is target[0]:
            time.sleep(STEP_S)
        return forward(model, batch)

    with mock.patch.object(TableModel, "forward", slow_forward):
        yield


@contextlib.asynccontextmanager
async def replicas(folder: Path) -> AsyncIterator[dict[str, Any]]:
    """Target and draft in this process, whose models are written into `folder`; the settings of a coordinator of
    theirs."""
    target, draft = write_pair(folder)
    main = TargetSettings(model=target, threads=1, **COMMON)
    guessing = DraftSettings(model=draft, target_tokenizer=target, threads=1, **COMMON)
    with slow_target():
        async with serving(run_target, main) as main_address, serving(run_draft, guessing) as draft_address:
            yield {"tokenizer": target, "target": main_address, "draft": draft_address, **COMMON}


@contextlib.asynccontextmanager
async def coordinator(**values: Any) -> AsyncIterator[pb_grpc.CoordinatorServiceStub]:
    """A coordinator in this process."""
    async with serving(run_coordinator, CoordinatorSettings(**values)) as address:
        async with grpc.aio.insecure_channel(address) as channel:
            yield pb_grpc.CoordinatorServiceStub(channel)


def request_of(plan: str) -> pb.GenerateRequest:
    """A request under COUPLED, whose text goes on."""
    sampling = pb.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.7, seed=1)
    speculative = pb.SpeculativePolicy(rule=types_pb.RULE_COUPLED, policy=PLANS[plan])
    return pb.GenerateRequest(text=PROMPT, sampling=sampling, speculative=speculative)


async def read(stub: pb_grpc.CoordinatorServiceStub, request: pb.GenerateRequest, delta_count: int) -> None:
    """Reads this many deltas of a text, then cancels it. Raises SpecdecError where the text ends before."""
    call, count = stub.Generate(request, timeout=600), 0
    async for response in call:
        count += response.HasField("delta")
        if count == delta_count:
            call.cancel()
            return
    raise SpecdecError(f"the text had {count} deltas, {delta_count} are needed")


async def measured(folder: Path, request_count: int, round_count: int, tracer: Tracer) -> dict[str, Any]:
    """Returns the ways of each request and of its rounds, without a trace, and the holdings of a traced request."""
    delta_count = STEADY_ROUND + round_count + 2
    ways: dict[str, list[Sequence[tuple[int, Place]]]] = {FIRST_DELTA: [], AUTO_ROUND: [], OFF_ROUND: []}
    async with replicas(folder) as settings:
        async with coordinator(**settings) as stub:
            for plan in PLANS:
                request = request_of(plan)
                for _ in range(WARM_TEXTS[plan]):
                    await read(stub, request, delta_count)
                for _ in range(request_count):
                    await asyncio.sleep(PAUSE_S)
                    with tracer.counting():
                        await read(stub, request, delta_count)
                    if plan == AUTO_ROUND:
                        ways[FIRST_DELTA].append(tracer.to_first_delta())
                    ways[plan] += tracer.rounds(round_count)
        async with coordinator(**settings, otlp_traces_endpoint=COLLECTOR) as stub:
            held = await holdings_of_two(stub, request_of(AUTO_ROUND))
    return {"ways": {name: as_json(own) for name, own in ways.items()}, "holdings": [own._asdict() for own in held]}


async def holdings_of_two(stub: pb_grpc.CoordinatorServiceStub, request: pb.GenerateRequest) -> list[Holding]:
    """Runs two requests together and returns the holdings of one of them in steady state."""
    gc.collect()
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            call = stub.Generate(request, timeout=600)
            stack.callback(call.cancel)
            for _ in range(STEADY_ROUND):
                await call.read()
        running = [held for held in gc.get_objects() if type(held).__name__ == "Generation" and is_own_kind(held)]
        if len(running) != 2:
            raise SpecdecError(f"{len(running)} generations run, not two")
        return holdings(*running)


def as_json(ways: Sequence[Sequence[tuple[int, Place]]]) -> dict[str, Any]:
    """The sizes of several ways of one kind, their medians, the functions on at least half of them, the least and the
    most calls of each function on any, and the number of functions on all: what other tasks did meanwhile, such as the
    draft's steps before the first delta, is on some."""
    sizes = [size_of(calls) for calls in ways]
    counts = [Counter(f"{place.file}:{place.name}" for _, place in calls) for calls in ways]
    ways_of = Counter(function for calls in counts for function in calls)
    called = {function: sorted(calls[function] for calls in counts) for function in sorted(ways_of)}
    return {
        "median": {name: statistics.median(getattr(size, name) for size in sizes) for name in Size._fields},
        "each": [size._asdict() for size in sizes],
        "on_all": sum(count == len(ways) for count in ways_of.values()),
        "functions": [function for function in called if 2 * ways_of[function] >= len(ways)],
        "calls": {function: (calls[0], calls[-1]) for function, calls in called.items()},
    }


def tables_of(found: Mapping[str, Any]) -> Iterable[Table]:
    """The two tables of a measurement."""
    table = Table(title="product functions on the way, medians")
    for name in ("", *Size._fields, "functions on all"):
        table.add_column(name, justify="right" if name else "left")
    for name, own in found["ways"].items():
        table.add_row(name, *(f"{value:g}" for value in own["median"].values()), str(own["on_all"]))
    yield table
    table = Table(title="mutable objects of one request")
    table.add_column("class")
    table.add_column("fields", justify="right")
    for own in found["holdings"]:
        table.add_row(own["name"], str(own["fields"]))
    table.add_row(f"all {len(found['holdings'])}", str(sum(own["fields"] for own in found["holdings"])))
    yield table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ways", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=5, help="texts whose ways are counted (%(default)s)")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each text that are counted (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the counts, and the functions, to this file")
    asked = parser.parse_args()
    tracer = Tracer()
    try:
        with tempfile.TemporaryDirectory() as scratch, tracer.installed():
            found = asyncio.run(measured(Path(scratch), asked.requests, asked.rounds, tracer))
    except SpecdecError as error:
        print(f"ways: {error}", file=sys.stderr)
        return 1
    for table in tables_of(found):
        Console(width=120).print(table)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
