"""Plain decoding by our services beside llama.cpp's server: the same weights and threads, prompt by prompt in turns.

Both servers are loaded at once, and one works at a time. Every request is timed whole by its client, and prompts are
token ids, so both have the same. A first token's time is that of a request for one token.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from tokenizers import Tokenizer

from bench.pipeline.samples import TIMEOUT_S
from bench.pipeline.variants import OFF, RULES_DEFAULT, request_of
from bench.prompts import prose_prompts
from bench.results import Ratio, ratio_of
from bench.step.llama_cpp import llama_server
from bench.step.timing import Timed
from specdec.chat.template import ChatTemplate
from specdec.client.run import Run
from specdec.engine.loading.model_folder import open_model_folder
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.harness import heldout_prompts, running

LONG_PROMPT = 1000  # tokens
Contender = Callable[[Sequence[int], int], Timed]  # (prompt ids, tokens)


@dataclass(frozen=True, slots=True)
class ServedMeasurement:
    """One model and thread count. Medians over prompts; `gain`: our tokens a second over theirs; `long_ratio`: our time
    to the first token of a long prompt over theirs; `equal_texts` of `text_count`: with the same tokens on both sides.
    Everything of theirs is None without llama.cpp. `seconds`, `long_seconds`: of every prompt, ours first."""

    model: str
    threads: int
    tokens_per_s: float
    their_tokens_per_s: float | None
    gain: Ratio | None
    long_ms: float
    their_long_ms: float | None
    long_ratio: Ratio | None
    equal_texts: int
    text_count: int
    seconds: tuple[tuple[float, ...], ...]
    long_seconds: tuple[tuple[float, ...], ...]

    @property
    def name(self) -> str:
        """As bars and tables have it."""
        return f"{self.model}, {self.threads} thread{'s' * (self.threads > 1)}"


def prompts_of(folder: Path, count: int) -> list[list[int]]:
    """Token ids of questions to a chat model, or of held-out prompts to another."""
    template = ChatTemplate.read(folder)
    if template is not None:
        return [list(prompt.ids(template)) for prompt in prose_prompts()[:count]]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in list(heldout_prompts().values())[:count]]


def long_prompts_of(folder: Path, count: int, length: int = LONG_PROMPT) -> list[list[int]]:
    """Different pieces of held-out text of `length` tokens each."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stock = list(itertools.chain.from_iterable(tokenizer.encode(prompt).ids for prompt in heldout_prompts().values()))
    shift = (len(stock) - length) // count
    return [stock[index * shift : index * shift + length] for index in range(count)]


def ours(stub: pb_grpc.CoordinatorServiceStub) -> Contender:
    """Plain greedy decoding through a coordinator; every request in a salt of its own, so nothing is reused."""

    def run(prompt_ids: Sequence[int], token_count: int) -> Timed:
        request = request_of(OFF, RULES_DEFAULT[0], prompt_ids, token_count, cache_salt=uuid.uuid4().hex)
        began_s = time.perf_counter()
        run = Run.of(stub.Generate(request, timeout=TIMEOUT_S))
        return Timed(time.perf_counter() - began_s, tuple(run.token_ids))

    return run


@contextlib.contextmanager
def contenders_of(folder: Path, threads: int, peer: tuple[Path, Path] | None) -> Iterator[list[Contender]]:
    """Ours, and theirs if there is a peer: our target and coordinator without a draft, and llama.cpp's server."""
    with contextlib.ExitStack() as stack:
        services = stack.enter_context(running(folder, None, dtype="bfloat16", threads=threads))
        channel = stack.enter_context(grpc.insecure_channel(services.coordinator.address))
        contenders = [ours(pb_grpc.CoordinatorServiceStub(channel))]
        if peer is not None:
            contenders.append(stack.enter_context(llama_server(*peer, threads)).complete)
        yield contenders


def measure_served(
    folder: Path,
    name: str,
    threads: int,
    peer: tuple[Path, Path] | None,
    prompt_count: int,
    long_count: int,
    token_count: int,
    advance: Callable[[], None] = lambda: None,
) -> ServedMeasurement:
    """In turns prompt by prompt, the first of them once before, to warm up. `peer`: llama.cpp's Python and its file of
    the same model. Raises ConfigError where a server does not start, grpc.RpcError and OSError where one fails."""
    with contenders_of(folder, threads, peer) as contenders:
        short: list[list[Timed]] = []
        long: list[list[Timed]] = []
        files = open_model_folder(str(folder)).path
        prompts = prompts_of(files, prompt_count)
        for prompt in [prompts[0], *prompts]:
            short.append([run(prompt, token_count) for run in contenders])
            advance()
        for prompt in long_prompts_of(files, long_count + 1):
            long.append([run(prompt, 1) for run in contenders])
            advance()
    return measurement_of(name, threads, short[1:], long[1:])


def measurement_of(
    name: str, threads: int, short: Sequence[Sequence[Timed]], long: Sequence[Sequence[Timed]]
) -> ServedMeasurement:
    """Of the requests of every prompt, ours first; ratios are of the same prompt."""
    mine, my_long = [own[0] for own in short], [own[0] for own in long]
    rate, long_ms = median_rate(mine), median_ms(my_long)
    seconds, long_seconds = seconds_of(short), seconds_of(long)
    if len(short[0]) == 1:
        return ServedMeasurement(
            name, threads, rate, None, None, long_ms, None, None, 0, len(short), seconds, long_seconds
        )
    theirs, their_long = [own[1] for own in short], [own[1] for own in long]
    return ServedMeasurement(
        name,
        threads,
        rate,
        median_rate(theirs),
        ratio_of([own.tokens_per_s / other.tokens_per_s for own, other in zip(mine, theirs)]),
        long_ms,
        median_ms(their_long),
        ratio_of([own.seconds / other.seconds for own, other in zip(my_long, their_long)]),
        sum(own.token_ids == other.token_ids for own, other in zip(mine, theirs)),
        len(short),
        seconds,
        long_seconds,
    )


def seconds_of(prompts: Sequence[Sequence[Timed]]) -> tuple[tuple[float, ...], ...]:
    """Of every prompt, by contender."""
    return tuple(tuple(request.seconds for request in own) for own in prompts)


def median_rate(requests: Sequence[Timed]) -> float:
    """Tokens a second."""
    return statistics.median(request.tokens_per_s for request in requests)


def median_ms(requests: Sequence[Timed]) -> float:
    """Of whole requests."""
    return statistics.median(request.seconds for request in requests) * 1e3
