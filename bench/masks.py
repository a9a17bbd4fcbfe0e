"""`python -m bench.masks`: the CPU time of grammars, for vocabularies of 4,096 and 150,000 tokens.

Four schemas, each with a text of it: the first grammar of a process with the reading of the tokenizer, further schemas
up to their first mask, and the masks of a verification of eight rows at every place of the texts, whose draft tokens
are the next ones of the text. Then the time of a round of eight streams with a grammar over that without, through
running services on a model of random weights with this tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from tokenizers.implementations.byte_level_bpe import ByteLevelBPETokenizer

from bench.bars import Bar
from bench.gpu_models import Shape, plain_model
from bench.results import Cell, Results, Table, shown
from bench.runner import Contender, Prepared, Values, main
from specdec.client.request import Request, make_request
from specdec.client.stream import Client
from specdec.grammar.compiler import Compiled, Compiler
from specdec.grammar.matcher import PathMatcher
from specdec.protocol.grammar import Grammar
from specdec.tokenizer_file import whole_tokenizer
from tests.support import harness

ROWS = 8
PROMPT, ROUND_TOKENS = [*range(300, 332)], 96
MASKED, PLAIN = "with a grammar", "without"
TRAINED_TOKENS = 150_000
MEASURES: dict[str, tuple[str, float | None]] = {  # what is shown, and what it may take at most
    "first_ms": ("first grammar, with the tokenizer, ms", None),
    "schema_ms": ("a further schema, to its first mask, at most, ms", 20.0),
    "p50_ms": (f"masks of {ROWS} rows, p50, ms", 1.0),
    "p90_ms": (f"masks of {ROWS} rows, p90, ms", 4.0),
}
ROUND, ROUND_MAX = f"a round of {ROWS} streams, with a grammar / without", 1.05

Json = dict[str, Any]
TEXT: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}


def record(**properties: Json) -> Json:
    """Returns an object of exactly these members."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def entries(entry: Json) -> Json:
    """Returns an array."""
    return {"type": "array", "items": entry}


NODE: Json = record(name=TEXT, children=entries({"$ref": "#/$defs/node"}))
CASES: tuple[tuple[Json, Any], ...] = (
    (
        record(people=entries(record(name=TEXT, age=INTEGER, mood={"enum": ["calm", "happy", "sad"]}))),
        {"people": [{"name": "Ada", "age": 36, "mood": "calm"}, {"name": "Böðvar", "age": 51, "mood": "happy"}]},
    ),
    (
        record(date={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
        {"date": "2026-11-29", "id": "6f1c1de2-8d61-4a0a-9b0a-2f3f4ad3c7a1"},
    ),
    (
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        {"name": "root", "children": [{"name": "left", "children": [{"name": "last", "children": []}]}]},
    ),
    (
        {"type": "object"},
        {"deep": {"list": [1, 2.5e-3, None, True, {"größe": "12 °C"}]}, "text": "Any JSON object will do here."},
    ),
)

UNENDING: Json = record(lines={"type": "array", "items": TEXT, "minItems": ROUND_TOKENS})


def write_tokenizer(file: Path) -> Path:
    """Trains a byte-level BPE of TRAINED_TOKENS on the sources of two packages; its id 0 ends a text."""
    sources = [path for package in (torch, transformers) for path in Path(str(package.__file__)).parent.rglob("*.py")]
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in sorted(sources))
    made = ByteLevelBPETokenizer()
    own: Json = {"vocab_size": TRAINED_TOKENS, "special_tokens": ["<|end|>"], "show_progress": False}
    made.train_from_iterator(texts, **own)
    made.save(str(file))
    return file


def compiled(compiler: Compiler, schema: Json, end_token_id: int) -> tuple[Compiled, float]:
    """Returns the compiled schema, and the milliseconds of all threads until then."""
    began_s = time.process_time()
    found = compiler.compile(Grammar(json_schema=json.dumps(schema)), (end_token_id,)).result()
    return found, 1e3 * (time.process_time() - began_s)


def masks_ms(own: Compiled, text_ids: list[int], end_token_id: int, vocabulary_size: int) -> list[float]:
    """Returns the milliseconds of eight rows at each place of a text."""
    matcher, found = PathMatcher(own, (end_token_id,), vocabulary_size), []
    for place in range(len(text_ids) + 1):
        draft = text_ids[place : place + ROWS - 1]
        began_s = time.thread_time()
        matcher.rows(text_ids[:place], draft)
        found.append(1e3 * (time.thread_time() - began_s))
    return found


def grammars(file: Path, end_token_id: int, turn: int) -> Values:
    """The times of the schemas and of their masks, as in a process that has seen no grammar."""
    tokenizer, compiler = whole_tokenizer(file), Compiler(lambda: file)
    own = [compiled(compiler, schema, end_token_id) for schema, _ in CASES]
    times_ms = []
    for (grammar, _), (_, value) in zip(own, CASES):
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        times_ms += masks_ms(grammar, ids, end_token_id, tokenizer.get_vocab_size())
    values = {"first_ms": own[0][1], "schema_ms": max(ms for _, ms in own[1:])}
    return values | {"p50_ms": statistics.median(times_ms), "p90_ms": statistics.quantiles(times_ms, n=10)[-1]}


def write_model(folder: Path, tokenizer: Path, end_token_id: int) -> Path:
    """Writes a Llama of random weights, of the sizes of a model of 135 million parameters but for its vocabulary."""
    vocabulary_size = whole_tokenizer(tokenizer).get_vocab_size()
    shape = Shape("masked", 576, 12, 9, 3, 1536, vocabulary_size, is_tied=True, positions=1024)
    model = plain_model(shape, torch.device("cpu"), torch.bfloat16)
    model.config.eos_token_id = model.generation_config.eos_token_id = end_token_id
    model.save_pretrained(folder)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    return folder


def round_ms(address: str, is_masked: bool, turn: int) -> Values:
    """The mean milliseconds between the tokens of eight texts, which run at once, each of one row."""
    kind: Json = {"grammar": {"json_schema": UNENDING}} if is_masked else {"ignore_eos": True}

    async def one(request: Request) -> float:
        times = []
        async with Client(address, resume_s=0.0) as client, aclosing(client.messages(request)) as messages:
            async for message in messages:
                times += [time.perf_counter()] * len(message.delta.token_ids)
        return (times[-1] - times[0]) / (len(times) - 1)

    async def every() -> list[float]:
        own: Json = {"max_tokens": ROUND_TOKENS, "temperature": 1.0, "policy": "off", **kind}
        return await asyncio.gather(*(one(make_request(PROMPT, seed=seed, **own)) for seed in range(ROWS)))

    return {"round_ms": 1e3 * statistics.mean(asyncio.run(every()))}


class Masks:
    """See the module."""

    name = "masks"
    about = "grammars: CPU milliseconds, by the size of the vocabulary"
    turns, quick_turns, minutes = 15, 2, 12

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json instead (the embedded one, one made here)")
        parser.add_argument("--end-token-id", type=int, default=0, help="of the model (%(default)s)")

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        if asked.tokenizer:
            return [{"tokens": whole_tokenizer(asked.tokenizer).get_vocab_size()}]
        return [{"tokens": 4096}, *([] if asked.quick else [{"tokens": TRAINED_TOKENS}])]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        end_token_id = asked.end_token_id
        with TemporaryDirectory() as scratch, ExitStack() as running:

            def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
                running.close()
                file = asked.tokenizer or harness.TARGET_MODEL / "tokenizer.json"
                if not asked.tokenizer and cell["tokens"] == TRAINED_TOKENS:
                    file = write_tokenizer(Path(scratch) / "tokenizer.json")
                model = write_model(Path(scratch) / str(cell["tokens"]), file, end_token_id)
                address = running.enter_context(harness.running(model, None)).coordinator.address
                rounds = {name: partial(round_ms, address, name == MASKED) for name in (MASKED, PLAIN)}
                return {"grammars": partial(grammars, file, end_token_id), **rounds}

            yield contenders

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for measure, (what, bound) in MEASURES.items():
            medians = [results.median(cell, "grammars", measure) for cell in results.cells()]
            rows.append([what, *(shown(value, bound, is_limit=True) for value in medians), f"{bound or ''}"])
        ratios = [results.ratio(cell, MASKED, PLAIN, "round_ms") for cell in results.cells()]
        rows.append([ROUND, *(ratio.short(ROUND_MAX, True) if ratio else "" for ratio in ratios), f"{ROUND_MAX}"])
        columns = ["tokens", *(f"{cell['tokens']:,}" for cell in results.cells()), "bar"]
        return [Table("cost", self.about, columns, rows)]

    def bars(self, results: Results) -> list[Bar]:
        largest: Cell = {"tokens": max((int(cell["tokens"]) for cell in results.cells()), default=0)}
        of = f"{largest['tokens']:,} tokens"
        bars = [
            Bar(what, bound, results.median(largest, "grammars", measure), of, is_limit=True)
            for measure, (what, bound) in MEASURES.items()
            if bound is not None
        ]
        ratio = results.ratio(largest, MASKED, PLAIN, "round_ms")
        return [*bars, Bar(ROUND, ROUND_MAX, ratio.median if ratio else None, f"{of}: {ratio}", is_limit=True)]


BENCHMARK = Masks()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
