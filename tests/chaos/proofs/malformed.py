"""Malformed messages: structure-aware mutations of real traffic, a million for each service.

Real calls are recorded as bytes and changed by descriptor (tests.chaos.mutations). No message may end a process, be
answered UNKNOWN or INTERNAL, change a text beside it, or leave a session or a cache block behind. Health and reflection
of all three count as a service each.

A coordinator meets mutated answers too (tests.chaos.answers). A draft's may fail no request and change no text; a
target's may end texts UNAVAILABLE with how to resume, and once they are sound again, so are the texts. Of these there
are fewer, for each takes a part of a text.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from bench.bars import Bar
from specdec.engine.table_model import write_table_model
from specdec.v1 import types_pb2 as types_pb
from tests.chaos import mutations
from tests.chaos.answers import KINDS as ANSWERS
from tests.chaos.answers import AnswerFlood
from tests.chaos.flood import (
    DRAFT_STREAM,
    GENERATE_REQUEST,
    TARGET_STREAM,
    Counts,
    StreamFlood,
    UnaryFlood,
    sessions_of,
)
from tests.chaos.mutations import Mutator
from tests.chaos.traffic import GENERATE, record
from tests.chaos.wire import Node, read
from tests.support.pages import Watched, watched
from tests.support.services import fixed

SERVICES = ("coordinator", "target", "draft", "describe", "health", "reflection", *ANSWERS)
VOCABULARY_SIZE, POSITIONS_MAX = 7, 4096
CHANGES_MAX = {
    "coordinator": 6
}  # what stays valid is generated: with three changes a fifth of the requests, half the time
CHECK_EVERY = 50_000  # messages between two generations that must not have changed
SETTLE_S_MAX = 10.0
HELPERS: dict[str, tuple[str, list[Any]]] = {
    "health": (
        "/grpc.health.v1.Health/Check",
        [health_pb2.HealthCheckRequest(service=name) for name in ("", "alive", "specdec.v1.CoordinatorService")],
    ),
    "reflection": (
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        [
            reflection_pb2.ServerReflectionRequest(host="h", list_services=""),
            reflection_pb2.ServerReflectionRequest(file_by_filename="specdec/v1/types.proto"),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="specdec.v1.TargetService.Verify"),
            reflection_pb2.ServerReflectionRequest(
                file_containing_extension={"containing_type": "specdec.v1.GenerateRequest", "extension_number": 7}
            ),
            reflection_pb2.ServerReflectionRequest(all_extension_numbers_of_type="specdec.v1.GenerateRequest"),
        ],
    ),
}
DESCRIBE = {role: f"/specdec.v1.{role.title()}Service/Describe" for role in ("coordinator", "target", "draft")}
REFERENCES: tuple[dict[str, Any], ...] = (
    {"prompt": [1, 2], "temperature": 0, "speculative": fixed(3)},
    {"prompt": "<1><2>", "seed": 5, "speculative": fixed(4, draft_nodes_per_step=4), "logprobs": 1},
    {"prompt": [3], "seed": 6, "speculative": {"policy": "POLICY_OFF"}},
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The sizes of the proof."""
    parser.add_argument("--messages", type=int, default=1_000_000, help="mutated messages for each service")
    parser.add_argument("--answers", type=int, default=100_000, help="mutated answers of a draft, and of a target")
    parser.add_argument("--services", nargs="+", choices=SERVICES, default=list(SERVICES))
    parser.add_argument("--minutes", type=float, default=math.inf, help="end each flood then, whatever was sent")
    parser.add_argument("--seed", type=int, default=1)


class Witness:
    """What no message may change: processes, health, texts, sessions and cache blocks."""

    def __init__(self, running: Watched) -> None:
        self._running = running
        services = running.services
        assert services.draft is not None
        self._children = {"coordinator": services.coordinator, "target": services.target, "draft": services.draft}
        self._texts = [self._text(asked) for asked in REFERENCES]
        self.addresses = {name: child.address for name, child in self._children.items()}
        self.pids = {name: child.process.pid for name, child in self._children.items()}
        self.text_count = self.differing_count = self.ended_count = 0
        self.left_behind: dict[str, float] = {}
        self.not_serving: list[str] = []
        self._watches: list[grpc.Future] = []

    def _text(self, asked: dict[str, Any]) -> tuple[Any, ...]:
        return self._running.services.client.generate(max_tokens=24, ignore_eos=True, **asked).comparable

    def check(self) -> None:
        """Counts ended processes, waits until all sessions are closed, then generates the texts again."""
        self.ended_count = sum(not child.is_running for child in self._children.values())
        if self.ended_count:
            return
        ends_s = time.monotonic() + SETTLE_S_MAX
        while (held := self._held()) and time.monotonic() < ends_s:
            time.sleep(0.05)
        self.left_behind |= held
        for asked, text in zip(REFERENCES, self._texts):
            self.text_count += 1
            self.differing_count += self._text(asked) != text

    def _held(self) -> dict[str, float]:
        held = {}
        for name in ("target", "draft"):
            page = self._running.page(name)
            held[f"{name} sessions"] = page.value("specdec_sessions")
            held[f"{name} blocks"] = page.value("specdec_kv_cache_blocks", state="held")
        page = self._running.page("coordinator")
        for state in ("running", "waiting"):
            held[f"generations {state}"] = page.value(f"vllm:num_requests_{state}")
        return {name: value for name, value in held.items() if value}

    @contextmanager
    def watching_health(self) -> Iterator[None]:
        """Follows the health of every process; states other than SERVING are noted."""
        serving = health_pb2.HealthCheckResponse.SERVING

        def follow(name: str, call: Any) -> None:
            try:
                for state in call:
                    if state.status != serving:
                        self.not_serving.append(name)
            except grpc.RpcError:
                if not is_over.is_set():
                    self.not_serving.append(name)

        is_over, calls, channels = threading.Event(), [], []
        for name, address in self.addresses.items():
            channels.append(grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]))
            calls.append(health_pb2_grpc.HealthStub(channels[-1]).Watch(health_pb2.HealthCheckRequest()))
            threading.Thread(target=follow, args=(name, calls[-1]), daemon=True).start()
        try:
            yield
        finally:
            is_over.set()
            for call, channel in zip(calls, channels):
                call.cancel()
                channel.close()


class Floods:
    """The flood of each service, from recorded traffic."""

    def __init__(self, running: Watched, seed: int, counts: Counts) -> None:
        traffic, addresses = record(running.services, POSITIONS_MAX), _addresses(running)
        generated = [read(GENERATE_REQUEST.DESCRIPTOR, data) for data in traffic[GENERATE]]
        played = {kind: sessions_of(kind, traffic[kind.method]) for kind in (TARGET_STREAM, DRAFT_STREAM)}
        donors = [node for message in generated for node in _all_nodes(message) if _size(node) < 4096]
        donors += [node for sessions in played.values() for session in sessions for node in _all_nodes(session[:3])]
        self._addresses, self._generated, self._played = addresses, generated, played
        messages = {"coordinator": GENERATE_REQUEST, "target": TARGET_STREAM.request, "draft": DRAFT_STREAM.request}
        messages["describe"] = types_pb.DescribeRequest
        messages |= {name: type(asked[0]) for name, (_, asked) in HELPERS.items()}
        self.mutators = {
            name: Mutator(
                message.DESCRIPTOR,  # type: ignore[attr-defined]  # a message class
                donors,
                seed + index,
                CHANGES_MAX.get(name, mutations.CHANGES_MAX),
            )
            for index, (name, message) in enumerate(messages.items())
        }
        self._answers = {
            name: AnswerFlood(name, running.services, addresses[kind.name], seed, counts)
            for name, kind in ANSWERS.items()
        }
        self.mutators |= {name: flood.proxy.mutator for name, flood in self._answers.items()}
        self._counts = counts
        self._seed = seed

    async def run(self, service: str, count: int) -> None:
        """Sends `count` mutated messages to a service."""
        self._seed += 1
        counts = self._counts
        mutator = self.mutators[service]
        if service in ANSWERS:
            await self._answers[service].run(count)
        elif service == "coordinator":
            flood = UnaryFlood(service, GENERATE, [self._addresses[service]], mutator, self._seed)
            await flood.run(self._generated, count, counts)
        elif service == "describe":
            for role, method in DESCRIBE.items():
                own = UnaryFlood(service, method, [self._addresses[role]], mutator, self._seed)
                await own.run([[]], -(-count // 3), counts)
        elif service in HELPERS:
            method, asked = HELPERS[service]
            played = [read(one.DESCRIPTOR, one.SerializeToString()) for one in asked]
            await UnaryFlood(service, method, [*self._addresses.values()], mutator, self._seed).run(
                played, count, counts
            )
        else:
            kind = TARGET_STREAM if service == "target" else DRAFT_STREAM
            stream = StreamFlood(kind, self._addresses[service], mutator, self._seed)
            await asyncio.to_thread(stream.run, self._played[kind], count, counts)


def _all_nodes(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        if isinstance(node.value, list):
            yield from _all_nodes(node.value)


def _size(node: Node) -> int:
    return (
        sum(map(_size, node.value))
        if isinstance(node.value, list)
        else len(bytes(node.value))
        if isinstance(node.value, bytes)
        else 8
    )


def write_models(folder: Path) -> tuple[Path, Path]:
    """Table models whose texts mostly end soon: what stays valid is cheap."""
    for name, seed in (("target", 1), ("draft", 2)):
        size = VOCABULARY_SIZE
        logits = torch.randn((size + 1, size + 1, size), generator=torch.Generator().manual_seed(seed)) * 2
        logits[..., 0] += 2.0  # the end token
        write_table_model(folder / name, size, POSITIONS_MAX, logits=logits)
    return folder / "target", folder / "draft"


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Floods each service in turn; between two parts of a flood everything must be as before it."""
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder, watched(write_models(Path(folder))) as running:
        floods = Floods(running, asked.seed, counts)
        witness = Witness(running)
        columns = (*Progress.get_default_columns()[:1], BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress, witness.watching_health():
            for service in asked.services:
                due = due_of(asked, service)
                task = progress.add_task(service, total=due)
                counts.on_sent = lambda _, count, task=task: progress.advance(task, count)  # type: ignore[misc]  # task is bound
                over_s = time.monotonic() + 60 * asked.minutes
                while counts.sent[service] < due and time.monotonic() < over_s:
                    part = min(CHECK_EVERY, due - counts.sent[service])
                    asyncio.run(floods.run(service, part))
                    witness.check()
                    if witness.ended_count or counts.ended_count:
                        break
                    if not console.is_terminal:
                        console.print(f"{service}: {counts.sent[service]:,} of {due:,}")
        return report(asked, counts, witness, floods, console)


def due_of(asked: argparse.Namespace, service: str) -> int:
    """Mutated messages that a service must get."""
    return int(asked.answers if service in ANSWERS else asked.messages)


def _addresses(running: Watched) -> dict[str, str]:
    services = running.services
    assert services.draft is not None
    return {
        "coordinator": services.coordinator.address,
        "target": services.target.address,
        "draft": services.draft.address,
    }


def report(asked: argparse.Namespace, counts: Counts, witness: Witness, floods: Floods, console: Console) -> list[Bar]:
    """Prints what the mutations covered and how they were answered; returns the bars."""
    for fault in counts.faults:
        console.print(fault, soft_wrap=True)
    table = Table(title="malformed messages", show_lines=True)
    for column in ("service", "messages", "fields mutated", "kinds", "answers", "fields refused"):
        table.add_column(column)
    shares: dict[str, float] = {}
    for service in asked.services:
        mutator = floods.mutators[service]
        touched = mutator.fields.keys() & mutator.field_counts.keys()
        missed = sorted(mutator.fields.keys() - touched)
        shares[service] = len(touched) / len(mutator.fields) if mutator.fields else 1.0
        table.add_row(
            service,
            f"{counts.sent[service]:,}",
            f"{len(touched)} of {len(mutator.fields)}" + (f"; not {', '.join(missed)}" if missed else ""),
            _listed(mutator.kind_counts),
            _listed(counts.answers[service]),
            f"{len(counts.refused_fields[service])}: " + _listed(counts.refused_fields[service]),
        )
    console.print(table)
    sent = {service: counts.sent[service] for service in asked.services}
    of_all = "; ".join(f"{service} {count:,}" for service, count in sent.items())
    short = [service for service, count in sent.items() if count < due_of(asked, service)]
    left = "; ".join(f"{name} {value:g}" for name, value in witness.left_behind.items())
    return [
        Bar("services with fewer mutated messages than asked", 0, len(short), of_all, is_limit=True),
        Bar("processes ended", 0, witness.ended_count + counts.ended_count, is_limit=True),
        Bar("UNKNOWN, INTERNAL, no answer, or an end that no answer may cause", 0, counts.fault_count, is_limit=True),
        Bar("states of health other than SERVING", 0, len(witness.not_serving), ", ".join(witness.not_serving), True),
        Bar("texts that changed", 0, witness.differing_count, f"of {witness.text_count} generated between", True),
        Bar("texts that changed under malformed answers", 0, counts.changed_count, f"of {counts.text_count}", True),
        Bar("sessions, blocks and generations left", 0, sum(witness.left_behind.values()), left, True),
        Bar("share of fields mutated", 1.0, min(shares.values())),
    ]


def _listed(counts: Any) -> str:
    total = sum(counts.values()) or 1
    return ", ".join(f"{name or '(none)'} {100 * count / total:.1f}%" for name, count in counts.most_common())
