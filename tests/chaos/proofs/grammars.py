"""Hostile grammars at a rate: they cost their own request only.

Expressions that repeat repetitions, 64 KiB of patterns, ambiguous and wide grammars, each time another text, so that no
compilation is shared. Beside them streams without a grammar go on; what counts is their longest pause, beyond what they
have alone in the same run, and what the processes hold afterwards.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from rich.console import Console
from rich.progress import track

from bench.bars import Bar
from tests.chaos.gauges import Sample
from tests.support.services import MODELS, Client, Services, fixed, running

ENDS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
PATTERN_COUNT = 700
HOSTILE: dict[str, dict[str, Any]] = {
    "repeated repetitions": {"regex": "((.{1,100}){1,100}){1,100}NUMBER"},
    "repetitions after a token": {"lark": 'start: "a" X\nX: /((b{1,100}){1,100}){1,100}cNUMBER/'},
    "patterns": {
        "json_schema": {
            "type": "object",
            "properties": {
                f"k{index}": {"type": "string", "pattern": f"^[a-z]*x{index}NUMBER.*[0-9]{{1,20}}$"}
                for index in range(PATTERN_COUNT)
            },
            "additionalProperties": False,
        }
    },
    "ambiguous": {"lark": 'start: e "NUMBER"\ne: e e e | e e | "a" | "aa" | ""'},
    "wide": {
        "lark": "start: "
        + " | ".join(f"T{index}" for index in range(1500))
        + "".join(f"\nT{index}: /[a-z]*q{index}NUMBER[0-9]*/" for index in range(1500))
    },
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The sizes of the proof."""
    parser.add_argument("--seconds", type=float, default=60.0, help="(%(default)s)")
    parser.add_argument("--rate", type=float, default=10.0, help="hostile requests a second (%(default)s)")
    parser.add_argument("--streams", type=int, default=2, help="without a grammar, beside them (%(default)s)")


def grammar_of(number: int) -> tuple[str, dict[str, Any]]:
    """Returns the name and the grammar of the `number`-th request."""
    name = [*HOSTILE][number % len(HOSTILE)]
    return name, json.loads(json.dumps(HOSTILE[name]).replace("NUMBER", str(number)))


class Streams:
    """Texts without a grammar, one after the other in each of some threads. `longest_s`: of all times between two
    messages of a text, since the last `reset`."""

    def __init__(self, client: Client, count: int) -> None:
        self._client, self._is_over = client, threading.Event()
        self.longest_s, self.text_count = 0.0, 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        request = self._client.request("def f(", speculative=fixed(4), max_tokens=350, temperature=0, ignore_eos=True)
        while not self._is_over.is_set():
            last_s = 0.0
            for _ in self._client.stub.Generate(request, timeout=300):
                now_s = time.monotonic()
                self.longest_s = max(self.longest_s, now_s - last_s) if last_s else self.longest_s
                last_s = now_s
            self.text_count += 1

    def reset(self) -> float:
        """Returns the longest pause, and begins anew."""
        longest_s, self.longest_s = self.longest_s, 0.0
        return longest_s

    def close(self) -> None:
        """Ends the threads after their text."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def ask(client: Client, number: int) -> tuple[str, str]:
    """Sends the `number`-th hostile request; returns its name and how it ended."""
    name, grammar = grammar_of(number)
    try:
        client.generate("a", max_tokens=8, temperature=1, grammar=grammar)
    except grpc.RpcError as error:
        return name, str(error.code().name)
    return name, "text"


def attack(services: Services, asked: argparse.Namespace, first: int, console: Console) -> Counter[tuple[str, str]]:
    """Sends hostile requests at the rate for half of the time; returns how they ended."""
    count = max(len(HOSTILE), round(asked.rate * asked.seconds / 2))
    began_s, ended = time.monotonic(), []
    with ThreadPoolExecutor(64) as pool:
        for index in track(range(count), "hostile grammars", console=console):
            time.sleep(max(0.0, began_s + index / asked.rate - time.monotonic()))
            ended.append(pool.submit(ask, services.client, first + index))
    return Counter(one.result() for one in ended)


def held(services: Services) -> dict[str, Sample]:
    """What each process holds."""
    children = {"target": services.target, "draft": services.draft, "coordinator": services.coordinator}
    return {name: Sample.of(child.process.pid) for name, child in children.items() if child is not None}


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """The streams alone, then beside two halves of the attack."""
    with running(MODELS / "target", MODELS / "draft", threads=1) as services:
        ask(services.client, 0)  # reads the tokenizer in each process
        streams = Streams(services.client, asked.streams)
        time.sleep(asked.seconds / 6)
        quiet_s = streams.reset()
        ends = attack(services, asked, 1, console)
        after_half = held(services)
        ends += attack(services, asked, 1 + sum(ends.values()), console)
        pause_s = streams.reset()
        at_end = held(services)
        streams.close()
    for (name, end), count in sorted(ends.items()):
        console.print(f"{name}: {end} {count}")
    return bars(ends, quiet_s, pause_s, after_half, at_end, streams.text_count)


def bars(
    ends: Counter[tuple[str, str]],
    quiet_s: float,
    pause_s: float,
    before: dict[str, Sample],
    after: dict[str, Sample],
    text_count: int,
) -> list[Bar]:
    """The conditions of the proof."""
    allowed = {"text", *(code.name for code in ENDS)}
    others = sum(count for (_, end), count in ends.items() if end not in allowed)
    grown_mb = {name: after[name].memory_mb - before[name].memory_mb for name in after}
    threads = max(after[name].threads - before[name].threads for name in after)
    shown, alone = "; ".join(f"{name} {mb:.1f}" for name, mb in grown_mb.items()), f"{quiet_s:.3f} alone"
    return [
        Bar("hostile requests that ended in another way than by text or refusal", 0, others, is_limit=True),
        Bar("kinds of hostile grammars sent", len(HOSTILE), len({name for name, _ in ends})),
        Bar("texts beside them", 1, text_count),
        Bar("longest pause of a stream, s, beyond its own", 0.2, max(0.0, pause_s - quiet_s), alone, is_limit=True),
        Bar("MB more of a process in the second half", 30, max(grown_mb.values()), shown, is_limit=True),
        Bar("threads more in the second half", 0, threads, is_limit=True),
    ]
