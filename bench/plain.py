"""`python -m bench.plain`: plain decoding by our services beside llama.cpp's server, with the same weights and threads.

Both servers are loaded at once, and one works at a time, prompt by prompt. Every request is timed whole by its client;
prompts are token ids, so both have the same. A first token's time is that of a request for one token, after a prompt of
1,000; ours is asked for the same once more, and has it in its cache. llama.cpp comes in an environment of its own.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
from tokenizers import Tokenizer

from bench.bars import Bar, worst_of
from bench.pipeline.samples import TIMEOUT_S
from bench.pipeline.variants import OFF, RULES_DEFAULT, request_of
from bench.prompts import prose_prompts
from bench.results import Cell, Results, Table, shown
from bench.runner import Contender, Prepared, Values, main
from bench.step.gguf_file import write_gguf
from bench.step.llama_cpp import LlamaServer, environment, llama_server
from bench.step.models import DEEPENED, DENSE, EIGHT, FOUR, write_model
from specdec.chat.template import ChatTemplate
from specdec.client.run import Run
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import ConfigError
from specdec.folders import GGUF_SUFFIX
from specdec.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub
from tests.support.harness import heldout_prompts, running

OURS, THEIRS = "specdec", "llama.cpp"
MODELS = (FOUR, EIGHT, DENSE, DEEPENED)
GAINS = {DENSE: (1.3, 1.6), DEEPENED: (1.5, 2.3), FOUR: (1.2, 1.6), EIGHT: (1.2, 1.6)}  # over llama.cpp: bar, stretch
LONG, LONG_BAR = 1000, 1.3  # tokens of a long prompt, and its time over llama.cpp's
TOKENS = 96
RATE, FIRST, AGAIN = "tokens_per_s", "first_token_ms", "first_token_again_ms"


def prompts_of(folder: Path, count: int) -> list[Sequence[int]]:
    """Token ids of questions to a chat model, or of held-out prompts to another."""
    template = ChatTemplate.read(folder)
    if template is not None:
        return [template.encode([{"role": "user", "content": own.prompt}]) for own in prose_prompts()[:count]]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in list(heldout_prompts().values())[:count]]


def long_prompts_of(folder: Path, count: int, length: int = LONG) -> list[Sequence[int]]:
    """Different pieces of held-out text of `length` tokens each."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stock = list(itertools.chain.from_iterable(tokenizer.encode(prompt).ids for prompt in heldout_prompts().values()))
    shift = (len(stock) - length) // count
    return [stock[index * shift : index * shift + length] for index in range(count)]


class Prompts:
    """The prompts of a model's turns, and how each contender is timed on them."""

    def __init__(self, folder: Path, turns: int) -> None:
        files = open_model_folder(str(folder)).path
        self._short, self._long = prompts_of(files, turns + 1), long_prompts_of(files, turns + 1)

    def ours(self, stub: CoordinatorServiceStub) -> Contender:
        def seconds(prompt: Sequence[int], token_count: int, salt: str) -> float:
            request = request_of(OFF, RULES_DEFAULT[0], prompt, token_count, cache_salt=salt)
            began_s = time.perf_counter()
            Run.of(stub.Generate(request, timeout=TIMEOUT_S))
            return time.perf_counter() - began_s

        def measure(turn: int) -> Values:
            rate = TOKENS / seconds(self._short[turn % len(self._short)], TOKENS, uuid.uuid4().hex)
            salt = uuid.uuid4().hex  # nothing but the same prompt is found in the cache
            first, again = (seconds(self._long[turn], 1, salt) * 1e3 for _ in range(2))
            return {RATE: rate, FIRST: first, AGAIN: again}

        return measure

    def theirs(self, server: LlamaServer) -> Contender:
        def measure(turn: int) -> Values:
            rate = server.complete(self._short[turn % len(self._short)], TOKENS).tokens_per_s
            return {RATE: rate, FIRST: server.complete(self._long[turn], 1).seconds * 1e3}

        return measure


def python_of_llama() -> Path | None:
    """Returns the Python of llama.cpp's environment; None, with a line that says why, where it cannot be had."""
    try:
        return environment()
    except ConfigError as error:
        print(f"llama.cpp is left out: {error}", file=sys.stderr)
        return None


def name_of(cell: Cell) -> str:
    return f"{cell['model']}, {cell['threads']} thread{'s' * (int(cell['threads']) > 1)}"


class Plain:
    """See the module."""

    name = "plain"
    about = "plain greedy decoding by servers, one stream, beside llama.cpp on the same weights and threads"
    turns, quick_turns, minutes = 6, 2, 14

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--models", nargs="+", choices=MODELS, help="(all; one with --quick)")

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        models, threads = asked.models or (MODELS[:1] if asked.quick else MODELS), (1,) if asked.quick else (1, 2)
        return [{"model": model, "threads": count} for model in models for count in threads]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        python = python_of_llama()
        with TemporaryDirectory() as scratch, ExitStack() as running_now:

            def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
                running_now.close()
                model, threads = str(cell["model"]), int(cell["threads"])
                place = Path(scratch) / f"{model} {threads}"
                folder = write_model(model, place)
                prompts = Prompts(folder, asked.turns)
                services = running_now.enter_context(running(folder, None, dtype="bfloat16", threads=threads))
                channel = running_now.enter_context(grpc.insecure_channel(services.coordinator.address))
                found = {OURS: prompts.ours(CoordinatorServiceStub(channel))}
                if python is not None:
                    file = folder if folder.suffix == GGUF_SUFFIX else write_gguf(folder, place / "peer.gguf")
                    found[THEIRS] = prompts.theirs(running_now.enter_context(llama_server(python, file, threads)))
                return found

            yield contenders

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for cell in results.cells():
            rate, long = (results.ratio(cell, OURS, THEIRS, measure) for measure in (RATE, FIRST))
            bound = GAINS[str(cell["model"])][0]
            of_rate = [shown(results.median(cell, name, RATE)) for name in (OURS, THEIRS)]
            of_long = [shown(results.median(cell, name, FIRST)) for name in (OURS, THEIRS)]
            told = [rate.short(bound) if rate else "", *of_long, long.short(LONG_BAR, is_limit=True) if long else ""]
            rows.append([name_of(cell), *of_rate, *told, shown(results.median(cell, OURS, AGAIN))])
        columns = [
            "",
            "tokens/s",
            THEIRS,
            "ours / its",
            "first token after 1,000, ms",
            THEIRS,
            "ours / its",
            "again, cached",
        ]
        return [Table("beside_llama_cpp", self.about, columns, rows)]

    def bars(self, results: Results) -> Sequence[Bar]:
        bars = []
        for model, (bound, stretch) in GAINS.items():
            found = {name_of(cell): results.ratio(cell, OURS, THEIRS, RATE) for cell in results.cells(model=model)}
            gains = {name: ratio.median for name, ratio in found.items() if ratio}
            bars.append(worst_of(f"{model}: plain decoding / llama.cpp's", bound, gains, stretch=stretch))
        times = {name_of(cell): results.ratio(cell, OURS, THEIRS, FIRST) for cell in results.cells()}
        long = {name: ratio.median for name, ratio in times.items() if ratio}
        return [*bars, worst_of("prompt of 1,000 tokens / llama.cpp's time", LONG_BAR, long, True, 1.0)]


BENCHMARK = Plain()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
