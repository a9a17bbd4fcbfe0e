"""Asks a server of any system for a text of a fixed length, and times it by the client's clock."""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from bench.peers.servers import Server
from specdec.client.events import event_of
from specdec.client.request import make_request
from specdec.client.run import Run
from specdec.errors import SpecdecError
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.samples import TIMEOUT_S

SEED = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """One text, of all tokens that were asked for. `seconds`: of the whole request; `first_s`: to the first piece."""

    token_count: int
    seconds: float
    first_s: float
    text: str

    @property
    def digest(self) -> float:
        """A number below 65,536 by which texts of one system are compared."""
        return float(zlib.crc32(self.text.encode()) & 0xFFFF)


Ask = Callable[[Sequence[int], int, float], Answer]  # (prompt ids, tokens, temperature)


def timed(token_count: int, pieces: Iterator[str]) -> Answer:
    """Reads the pieces of a text. Raises SpecdecError where there are none."""
    began_s = time.perf_counter()
    first_s = 0.0
    text = []
    for piece in pieces:
        first_s = first_s or time.perf_counter() - began_s
        text.append(piece)
    if not text:
        raise SpecdecError("a server answered nothing")
    return Answer(token_count, time.perf_counter() - began_s, first_s, "".join(text))


def over_http(server: Server, **greedy: Any) -> Ask:
    """Asks OpenAI's interface of vLLM or llama.cpp. `greedy`: what it is told beside at temperature 0."""

    def pieces(body: dict[str, Any]) -> Iterator[str]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.address}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:]).get("choices", ()):
                        yield choice["text"]

    def ask(prompt_ids: Sequence[int], max_tokens: int, temperature: float) -> Answer:
        sampling = {"temperature": temperature, "seed": SEED, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        body = {"model": "m", "prompt": list(prompt_ids), "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        return timed(max_tokens, pieces(body | sampling | (greedy if temperature == 0 else {})))

    return ask


def over_grpc(address: str, **policy: Any) -> Ask:
    """Asks a coordinator; each request in a salt of its own, so that no prompt is reused."""
    stub = pb_grpc.CoordinatorServiceStub(grpc.insecure_channel(address))

    def pieces(prompt_ids: Sequence[int], max_tokens: int, temperature: float) -> Iterator[str]:
        sampling: dict[str, Any] = {"temperature": temperature} | ({"seed": SEED} if temperature else {})
        own = {"max_tokens": max_tokens, "ignore_eos": True, "cache_salt": uuid.uuid4().hex, **sampling, **policy}
        run = Run()
        for response in stub.Generate(make_request(prompt_ids, **own), timeout=TIMEOUT_S):
            before = len(run.token_ids)
            run.take(event_of(response))
            if len(run.token_ids) > before:
                yield " ".join(map(str, run.token_ids[before:])) + " "

    return lambda *asked: timed(asked[1], pieces(*asked))


def over_pipe(server: Server) -> Ask:
    """Asks `transformers_serve.py`."""
    pipe = server.pipe
    assert pipe is not None and pipe.stdin is not None and pipe.stdout is not None
    writes, reads = pipe.stdin, pipe.stdout

    def pieces(prompt_ids: Sequence[int], max_tokens: int, temperature: float) -> Iterator[str]:
        asked = {"ids": list(prompt_ids), "max_tokens": max_tokens, "temperature": temperature, "seed": SEED}
        writes.write(json.dumps(asked) + "\n")
        writes.flush()
        for line in reads:
            told = json.loads(line)
            if "end" in told:
                return
            yield " ".join(map(str, told["ids"])) + " "
        raise SpecdecError("transformers ended")

    return lambda *asked: timed(asked[1], pieces(*asked))


def measured(
    server: Server, ask: Ask, prompts: Sequence[Sequence[int]], max_tokens: int, heat: float
) -> dict[str, float]:
    """Asks for all texts at once, each by a thread, while the server alone works."""
    with server.working(), ThreadPoolExecutor(len(prompts)) as threads:
        cpu_s, began_s = server.cpu_s(), time.perf_counter()
        answers = list(threads.map(lambda prompt_ids: ask(prompt_ids, max_tokens, heat), prompts))
        took_s = time.perf_counter() - began_s
        cpu_s = server.cpu_s() - cpu_s
    tokens = sum(answer.token_count for answer in answers)
    return {
        "tokens_per_s": tokens / took_s,
        "first_token_ms": 1e3 * statistics.median(answer.first_s for answer in answers),
        "cpu_ms_per_token": 1e3 * cpu_s / tokens,
        "memory_mb": server.memory_mb(),
        "digest": answers[0].digest,
    }
