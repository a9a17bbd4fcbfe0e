"""What the gateway adds to gRPC: CPU per event, time to the first token and per event, throughput, start and memory.

`python -m bench.gateway` runs the same texts through `Generate` and through HTTP, in turn, on the same services, and
prints ratios. CPU times are those of a process that does nothing else: the gateway, and a bare gRPC reader.
`--vocabulary N` instead trains a tokenizer of N tokens on the sources of the installed packages, and prints start and
memory of a gateway with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
import urllib.request
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch

from bench.gpu_models import TINY, plain_model
from specdec.client.request import make_request
from specdec.client.stream import Client
from specdec.gateway_settings import GatewaySettings
from specdec.launch.children import Child, start
from specdec.settings import split_address
from tests.support import harness

PROMPT = [7, 300, 1200, 45, 9] * 40  # of 200 tokens
TRAINING_BYTES = 40 << 20  # of text, for 150,000 tokens
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
BODY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True}


async def through_grpc(address: str, count: int, seed: int) -> AsyncGenerator[float, None]:
    """Yields the time of the start of a text, and that of each event, in seconds."""
    request = make_request(PROMPT, temperature=0.0, ignore_eos=True, max_tokens=count, cache_salt=str(seed))
    async with Client(address, resume_s=0.0) as client:
        yield time.perf_counter()
        async with aclosing(client.messages(request)) as messages:
            async for message in messages:
                if message.HasField("delta"):
                    yield time.perf_counter()


async def through_http(address: str, count: int, seed: int) -> AsyncGenerator[float, None]:
    """As `through_grpc`, over HTTP."""
    reader, writer = await asyncio.open_connection(*split_address(address))
    data = json.dumps(BODY | {"max_tokens": count, "cache_salt": str(seed)}).encode()
    lines = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close")
    head = "\r\n".join([*lines, f"Content-Length: {len(data)}"])
    yield time.perf_counter()
    writer.write(head.encode() + b"\r\n\r\n" + data)
    while line := await reader.readline():
        if line.startswith(b'data: {"id"') and b'"finish_reason":null' in line:
            yield time.perf_counter()
    writer.close()


async def measure(way: Any, address: str, count: int, width: int, seed: int) -> tuple[float, list[float], list[float]]:
    """Runs texts, `width` at once; returns the seconds of all, the times to the first event, and between events."""
    firsts: list[float] = []
    gaps: list[float] = []

    async def one(number: int) -> None:
        times = [own async for own in way(address, count, seed * 1000 + number)]
        firsts.append(times[1] - times[0])
        gaps.extend(later - sooner for sooner, later in zip(times[1:], times[2:]))

    begin_s = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(width)))
    return time.perf_counter() - begin_s, firsts, gaps


def bare_reader(address: str, count: int, width: int, results: Any) -> None:
    """A process that reads texts by gRPC and does nothing else; puts its CPU seconds and its number of events."""

    async def run() -> tuple[float, int]:
        await measure(through_grpc, address, 16, 1, 1)  # connects, imports
        begin_s = time.process_time()
        _, firsts, gaps = await measure(through_grpc, address, count, width, 2)
        return time.process_time() - begin_s, len(firsts) + len(gaps)

    results.put(asyncio.run(run()))


def cpu_s(child: Child) -> float:
    """CPU seconds of a process so far."""
    with open(f"/proc/{child.process.pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def quantiles_ms(values: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile, in milliseconds."""
    ordered = sorted(values)
    return 1000 * statistics.median(ordered), 1000 * ordered[int(0.99 * (len(ordered) - 1))]


def report(grpc_address: str, gateway: Child, count: int, repeats: int) -> None:
    """Prints the comparison."""
    context = multiprocessing.get_context("spawn")
    for width in (1, 32):
        results = context.Queue()
        before_s = cpu_s(gateway)
        events = 0
        ways: dict[str, list[Any]] = {"grpc": [], "http": []}
        for repeat in range(repeats):
            for name, way, address in (("grpc", through_grpc, grpc_address), ("http", through_http, gateway.address)):
                ways[name].append(asyncio.run(measure(way, address, count, width, repeat)))
        events = sum(len(firsts) + len(gaps) for _, firsts, gaps in ways["http"])
        per_event_us = 1e6 * (cpu_s(gateway) - before_s) / events
        reader = context.Process(target=bare_reader, args=(grpc_address, count, width, results))
        reader.start()
        reader_s, reader_events = results.get(timeout=600)
        reader.join()
        bare_us = 1e6 * reader_s / reader_events
        print(
            f"{width} streams: CPU {per_event_us:.0f} µs an event, bare reader {bare_us:.0f}, "
            f"ratio {per_event_us / bare_us:.2f}"
        )
        for what, place in (("first event", 1), ("between events", 2)):
            (one, one_99), (two, two_99) = (
                quantiles_ms([value for run in ways[name] for value in run[place]]) for name in ("grpc", "http")
            )
            print(
                f"  {what}: gRPC {one:.2f} ms (p99 {one_99:.2f}), HTTP {two:.2f} (p99 {two_99:.2f}), "
                f"added {two - one:+.2f}"
            )
        ratios = [one[0] / two[0] for one, two in zip(ways["grpc"], ways["http"])]
        print(f"  throughput of HTTP / gRPC: {statistics.median(ratios):.3f}")


def training_texts() -> Iterator[str]:
    """Yields sources of the installed packages, TRAINING_BYTES of them."""
    byte_count = 0
    for path in sorted(Path(tokenizers.__file__).parents[1].rglob("*.py")):
        byte_count += path.stat().st_size
        if byte_count > TRAINING_BYTES:
            return
        yield path.read_text(encoding="utf-8", errors="replace")


def make_model(folder: Path, vocabulary_size: int) -> None:
    """Writes a tiny model with a byte-level BPE of this size and a chat template."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary_size, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    made.train_from_iterator(training_texts(), trainer)
    plain_model(
        replace(TINY, vocabulary=made.get_vocab_size(), positions=4096), torch.device("cpu"), torch.float32
    ).save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    print(
        f"{made.get_vocab_size()} tokens, tokenizer.json of {(folder / 'tokenizer.json').stat().st_size / 1e6:.1f} MB"
    )


def report_vocabulary(vocabulary_size: int, repeats: int) -> None:
    """Prints start and memory of gateways whose tokenizer has this many tokens, after chats of some 2,000 tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, vocabulary_size)
        chat = {"messages": [{"role": "user", "content": next(training_texts())[:6000]}], "max_tokens": 16}
        with harness.running(folder, None, threads=1) as services:
            settings = GatewaySettings(
                port=0, address=(services.coordinator.address,), model=str(folder), log_level="error"
            )
            for _ in range(repeats):
                begin_s = time.perf_counter()
                with start("gateway", settings) as gateway:
                    gateway.wait_ready()
                    ready_s, own_s = time.perf_counter() - begin_s, cpu_s(gateway)
                    for path, body in (("/v1/chat/completions", chat), ("/tokenize", {"messages": chat["messages"]})):
                        post(gateway.address, path, body)
                    memory = gateway.memory_peak_bytes / 1e6
                print(f"start {ready_s:.1f} s, of which CPU {own_s:.1f} s; memory {memory:.0f} MB")


def post(address: str, path: str, body: dict[str, Any]) -> None:
    """Sends a request and reads its answer. Raises AssertionError unless it is 200."""
    request = urllib.request.Request(
        f"http://{address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200 and answer.read()


def main() -> None:
    """Starts services and a gateway, and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200, help="of each text")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, help="tokens of a tokenizer made for start and memory alone")
    asked = parser.parse_args()
    if asked.vocabulary is not None:
        report_vocabulary(asked.vocabulary, asked.repeats)
        return
    with harness.running(coordinator={"speculation_policy": "auto"}, threads=1) as services:
        address = services.coordinator.address
        begin_s = time.perf_counter()
        with start("gateway", GatewaySettings(port=0, address=(address,), log_level="error")) as gateway:
            gateway.wait_ready()
            print(f"start {time.perf_counter() - begin_s:.1f} s")
            asyncio.run(measure(through_http, gateway.address, 50, 4, 99))
            report(address, gateway, asked.tokens, asked.repeats)
            print(f"memory {gateway.memory_peak_bytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
