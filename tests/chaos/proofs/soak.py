"""The services for an hour under texts, with a fault every 20 s: no wrong token, no growth.

Two sites cross: a coordinator that lives all the time uses a target and a draft that are killed; a target and a draft
that live are used by a coordinator that is killed. So each kind of service has one that lives all the time while its
peers die. Freezes, cuts, stalled readers, cancels and malformed input strike all. The texts are those of the shipped
pair under GREEDY and COUPLED, with and without branches.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from rich.console import Console

from bench.bars import Bar, worst_of
from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.chaos.gauges import Series, by_name
from tests.chaos.processes import Link, Restartable, metric_values
from tests.chaos.texts import SPECULATIVE, Readers, Text, open_channel, references_of, send_burst
from tests.support.harness import DRAFT_MODEL, TARGET_MODEL, heldout_prompts
from tests.support.ports import free_port

GENERATE = "/specdec.v1.CoordinatorService/Generate"
INTERNAL_STREAMS = {"target": "/specdec.v1.TargetService/Verify", "draft": "/specdec.v1.DraftService/Draft"}
REFUSALS = ("INVALID_ARGUMENT", "UNAVAILABLE", "RESOURCE_EXHAUSTED")
SAMPLE_S = 3.0
STALLED_S = 45.0  # a stalled reader loses its generation after 30 s
SETTLE_S = 40.0
FAULT_SHARE = 0.9  # of those due: a fault and its repair may take longer than the time between two
PROMPT_CHARACTERS = 300


@dataclass(slots=True)
class World:
    """The processes and links. `steady` ones live all the time."""

    steady: dict[str, Restartable]
    struck: dict[str, Restartable]
    links: list[Link]

    @property
    def coordinators(self) -> list[Restartable]:
        return [self.steady["coordinator"], self.struck["coordinator"]]

    def stop(self) -> None:
        """Stops what was started, coordinators first."""
        for role in ("coordinator", "draft", "target"):
            for site in (self.struck, self.steady):
                if role in site:
                    site[role].stop()
        for link in self.links:
            link.stop()


@contextlib.contextmanager
def world() -> Iterator[World]:
    """Starts two of each service; the coordinators reach their replicas over links that can be cut."""
    made = World({}, {}, [])
    common = {"port": 0, "log_level": "error", "drain_grace_s": 1.0}
    small: dict[str, Any] = {"threads": 1, "max_model_len": 1024}  # caches that are full within the warm-up

    def paged() -> dict[str, object]:
        return {**common, "metrics_address": f"127.0.0.1:{free_port()}"}

    try:
        for site in (made.steady, made.struck):
            target = TargetSettings(**paged(), model=str(TARGET_MODEL), kv_cache_bytes=32 << 20, **small)
            draft = DraftSettings(**paged(), model=str(DRAFT_MODEL), kv_cache_bytes=4 << 20, **small)
            site["target"] = Restartable("target", "target", target)
            site["draft"] = Restartable("draft", "draft", draft)
            for service in site.values():
                service.wait_ready()
        for site, peers in ((made.steady, made.struck), (made.struck, made.steady)):
            links = [Link(peers[role].address) for role in ("target", "draft")]
            made.links += links
            settings = CoordinatorSettings(
                **paged(), tokenizer=str(TARGET_MODEL), target=links[0].address, draft=links[1].address
            )
            site["coordinator"] = Restartable("coordinator", "coordinator", settings)
            site["coordinator"].wait_ready()
        yield made
    finally:
        made.stop()


@dataclass(slots=True)
class Faults:
    """Faults by name; one at a time, from the main thread. `kinds`: the names that may be chosen, all if empty;
    `unexpected`: answers that no fault explains."""

    world: World
    texts: list[Text]
    chance: random.Random
    kinds: list[str] = field(default_factory=list)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    unexpected: list[str] = field(default_factory=list)
    _stalled: list[tuple[float, grpc.Channel]] = field(default_factory=list)

    def one(self) -> str:
        """Makes one fault and repairs it; returns its name."""
        kinds: dict[str, Callable[[], None]] = {
            "draft killed": lambda: self._kill("draft"),
            "draft frozen": lambda: self._freeze("draft", 8.0),
            "target killed": lambda: self._kill("target"),
            "target frozen": lambda: self._freeze("target", 6.0),
            "coordinator killed": lambda: self._kill("coordinator"),
            "coordinator frozen": lambda: self._freeze("coordinator", 6.0),
            "link cut": lambda: self.chance.choice(self.world.links).cut(self.chance.uniform(0.3, 8.0)),
            "stalled reader": self._stall,
            "cancels": self._cancel,
            "malformed input": self._malformed,
        }
        name = self.chance.choice(self.kinds or list(kinds))
        self.counts[name] += 1
        kinds[name]()
        self.end_stalled(time.monotonic())
        return name

    def _kill(self, role: str) -> None:
        struck = self.world.struck[role]
        struck.kill()
        time.sleep(self.chance.uniform(0.0, 3.0))
        struck.restart()

    def _freeze(self, role: str, longest_s: float) -> None:
        site = self.chance.choice([self.world.steady, self.world.struck])
        site[role].freeze(self.chance.uniform(0.3, longest_s))

    def _stall(self) -> None:
        """A client that takes one message, then none, and leaves after the service gave it up."""
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
        channel = grpc.insecure_channel(self.chance.choice(self.world.coordinators).address, options=options)
        request = self.chance.choice(self.texts).request(self.chance.choice(SPECULATIVE))
        request.sampling.logprobs = 20
        request.sampling.ignore_eos = True
        request.sampling.max_tokens = 400
        with contextlib.suppress(grpc.RpcError):
            next(channel.unary_stream(GENERATE)(request.SerializeToString(), timeout=300))
        self._stalled.append((time.monotonic() + STALLED_S, channel))

    def end_stalled(self, now_s: float) -> None:
        """Closes the connections of stalled readers whose time is over."""
        for due_s, channel in self._stalled:
            if due_s <= now_s:
                channel.close()
        self._stalled = [(due_s, channel) for due_s, channel in self._stalled if due_s > now_s]

    def _cancel(self) -> None:
        """Requests that are cancelled at random moments."""
        with open_channel(self.chance.choice(self.world.coordinators).address) as channel:
            stub = pb_grpc.CoordinatorServiceStub(channel)
            for _ in range(20):
                request = self.chance.choice(self.texts).request(self.chance.choice(SPECULATIVE))
                call = stub.Generate(request, timeout=60)
                with contextlib.suppress(grpc.RpcError, StopIteration):
                    for _ in range(self.chance.randrange(8)):
                        next(call)
                call.cancel()

    def _malformed(self) -> None:
        """Bytes that are no message, and messages with fields outside their limits, to every service."""
        broken = self.chance.randbytes(self.chance.randrange(1, 2000)) + b"\xff"
        nan = self.texts[0].request({})
        nan.sampling.temperature = float("nan")
        endless = self.texts[0].request({})
        endless.sampling.max_tokens = 10**9
        many = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(stop_token_ids=[1] * 100_000))
        for service in self.world.coordinators:
            with open_channel(service.address) as channel:
                for data in (broken, *(one.SerializeToString() for one in (nan, endless, many))):
                    self._expect_refusal(channel.unary_stream(GENERATE)(data, timeout=30))
        for site in (self.world.steady, self.world.struck):
            for role, method in INTERNAL_STREAMS.items():
                with open_channel(site[role].address) as channel:
                    self._expect_refusal(channel.stream_stream(method)(iter([broken]), timeout=30))

    def _expect_refusal(self, call: Iterator[object]) -> None:
        try:
            for _ in call:
                pass
            self.unexpected.append("malformed input was accepted")
        except grpc.RpcError as error:
            if error.code().name not in REFUSALS:
                self.unexpected.append(f"malformed input: {error.code().name} {error.details()}")


class Watch:
    """Samples the steady processes in a thread and reports one line a minute."""

    def __init__(self, series: dict[str, Series], report: Callable[[str], None]) -> None:
        self._series, self._report = series, report
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began_s = time.monotonic()
        while not self._is_over.wait(SAMPLE_S):
            for one in self._series.values():
                one.sample()
            if time.monotonic() - began_s >= 60 * (1 + len(next(iter(self._series.values())).minutes)):
                found = {name: one.end_minute(began_s) for name, one in self._series.items()}
                self._report(
                    ", ".join(
                        f"{name} {one.memory_mb:.2f} MB {one.descriptors} fd {one.threads} threads"
                        for name, one in found.items()
                    )
                )

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


def texts_of(count: int) -> list[Text]:
    """Half GREEDY, half COUPLED, of different lengths."""
    prompts = [prompt[:PROMPT_CHARACTERS] for prompt in heldout_prompts().values()]
    return [
        Text(prompts[number % len(prompts)], float(number % 2), 1000 + number, 40 + 8 * (number % 10))
        for number in range(count)
    ]


def left_over(made: World) -> dict[str, float]:
    """Requests, sessions and cache blocks that the steady services still hold."""
    names = {
        "coordinator": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
        "target": ("specdec_sessions", "specdec_kv_cache_usage_perc"),
        "draft": ("specdec_sessions", "specdec_kv_cache_usage_perc"),
    }
    found = {}
    for role, own in names.items():
        address = made.steady[role].metrics_address
        assert address is not None
        found |= {f"{role} {name.removeprefix('specdec_')}": metric_values(address, name) for name in own}
    return found


def tasks_of(made: World) -> dict[str, float]:
    """Tasks of the event loops of the steady services."""
    addresses = {role: service.metrics_address for role, service in made.steady.items()}
    return {role: metric_values(address, "specdec_tasks") for role, address in addresses.items() if address}


def bars_of(
    readers: Readers,
    faults: Faults,
    series: dict[str, Series],
    left: dict[str, float],
    more_tasks: dict[str, float],
    warm_up_h: float,
    fault_count_min: float,
) -> list[Bar]:
    """The conditions."""
    grown = []
    if min(len(one.after(warm_up_h)) for one in series.values()) >= 2:  # minutes; fewer have no slope
        slopes = {name: one.memory_slope_mb_h(warm_up_h) for name, one in series.items()}
        grown = [
            worst_of("memory, MB per hour after warm-up", 1.0, slopes, is_limit=True),
            worst_of("growth of descriptors", 0, by_name(series, "descriptors", warm_up_h), is_limit=True),
            worst_of("growth of threads", 0, by_name(series, "threads", warm_up_h), is_limit=True),
        ]
    other_codes = {code: float(count) for code, count in readers.codes.items() if code != "UNAVAILABLE"}
    shown = f"{readers.text_count} texts, {readers.token_count} tokens, {readers.resumed_count} resumed; "
    shown += ", ".join(f"{count} {name}" for name, count in sorted(faults.counts.items()))
    return [
        Bar("texts that differ from their reference or did not end", 0, len(readers.wrong), shown, is_limit=True),
        worst_of("errors other than UNAVAILABLE", 0, other_codes or {"none": 0.0}, is_limit=True),
        Bar("malformed input not refused", 0, len(faults.unexpected), "; ".join(faults.unexpected[:3]), is_limit=True),
        *grown,
        worst_of("requests, sessions and cache share held at the end", 0, left, is_limit=True),
        worst_of("tasks at rest, more than before", 0, more_tasks, is_limit=True),
        Bar("draft tokens accepted", 1, readers.draft_tokens_accepted),
        Bar("faults", fault_count_min, sum(faults.counts.values())),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=60.0, help="length (%(default)s)")
    parser.add_argument("--fault-every", type=float, default=20.0, metavar="S", help="(%(default)s)")
    parser.add_argument("--faults", nargs="+", default=[], metavar="NAME", help="kinds of them (all)")
    parser.add_argument("--texts", type=int, default=24, help="different ones (%(default)s)")
    parser.add_argument("--warm-up", type=float, default=15.0, metavar="MIN", help="not in slopes (%(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="clients (%(default)s)")
    parser.add_argument("--pause", type=float, default=3.0, metavar="S", help="longest between texts (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of faults and texts (%(default)s)")


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Runs the soak."""
    texts = texts_of(asked.texts)
    with world() as made:
        began_s = time.monotonic()

        def say(sentence: str) -> None:
            console.print(f"{(time.monotonic() - began_s) / 60:5.1f} min  {sentence}", highlight=False, soft_wrap=True)

        references = references_of(made.steady["coordinator"].address, texts)
        assert len({content.text for content in references.values()}) > len(texts) // 2
        say(f"{len(references)} references of {sum(len(one.token_ids) for one in references.values())} tokens")
        for coordinator in made.coordinators:  # all services; a draft's cache takes memory at its first use
            send_burst(coordinator.address, texts, SPECULATIVE)
        time.sleep(2.0)
        tasks = tasks_of(made)
        readers = Readers(references, (0.2, asked.pause), asked.seed)
        faults = Faults(made, texts, random.Random(asked.seed), asked.faults)
        series = {name: Series(service.pid) for name, service in made.steady.items()}
        readers.start([made.coordinators[number % 2].address for number in range(asked.streams)])

        def report(sentence: str) -> None:
            total = sum(faults.counts.values())
            say(f"{readers.text_count} texts, {len(readers.wrong)} wrong, {total} faults; {sentence}")

        watch = Watch(series, report)
        over_s = began_s + 60 * asked.minutes
        due_s = time.monotonic()
        while (due_s := max(due_s + asked.fault_every, time.monotonic())) < over_s:  # late ones do not crowd
            time.sleep(max(0.0, due_s - time.monotonic()))
            faults.one()
        time.sleep(max(0.0, over_s - time.monotonic()))
        readers.stop()
        time.sleep(SETTLE_S if faults.counts["stalled reader"] else 5.0)
        faults.end_stalled(float("inf"))
        time.sleep(2.0)
        watch.stop()
        for line in readers.wrong[:10]:
            say(line)
        say(f"errors by code: {dict(readers.codes)}")
        due_count = 60 * asked.minutes / asked.fault_every
        more_tasks = {role: count - tasks[role] for role, count in tasks_of(made).items()}
        counted = left_over(made), more_tasks, asked.warm_up / 60, max(1.0, FAULT_SHARE * due_count)
        return bars_of(readers, faults, series, *counted)
