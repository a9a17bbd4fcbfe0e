"""`python -m bench.masks --tokenizer tokenizer.json`: the time of grammars for a tokenizer, by the thread's CPU clock.

Ten schemas, each with a text of it: the first grammar of a process with the reading of the tokenizer, further schemas
up to their first mask, and the masks of a verification of eight rows at every place of the texts, whose draft tokens
are the next ones of the text. Then the time of a round of eight streams with a grammar over that without, in turns,
through running services on a model of random weights with this tokenizer. Bars are for 150,000 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.bars import Bar, add_check_flag, conclude
from bench.gpu_models import Shape, plain_model
from bench.results import Ratio, ratio_of
from specdec.client.request import Request, make_request
from specdec.client.stream import Client
from specdec.folders import EMBEDDED_MODELS
from specdec.grammar.compiler import Compiled, Compiler
from specdec.grammar.matcher import PathMatcher
from specdec.protocol.grammar import Grammar
from specdec.tokenizer_file import whole_tokenizer
from tests.support import harness

ROWS = 8
P50_MS, P90_MS, NEW_SCHEMA_MS = 1.0, 4.0, 20.0
ROUND_RATIO, ROUND_TOKENS = 1.05, 96
PROMPT_LENGTH = 32

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
        record(title=TEXT, summary=TEXT),
        {
            "title": "A day at the sea",
            "summary": "Two friends walk along a shore, find a bottle and read its letter.",
        },
    ),
    (
        record(people=entries(record(name=TEXT, age=INTEGER, mood={"enum": ["calm", "happy", "sad"]}))),
        {"people": [{"name": "Ada", "age": 36, "mood": "calm"}, {"name": "Böðvar", "age": 51, "mood": "happy"}]},
    ),
    (
        record(date={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
        {"date": "2026-11-29", "id": "6f1c1de2-8d61-4a0a-9b0a-2f3f4ad3c7a1"},
    ),
    (
        record(latitude={"type": "number", "minimum": -90, "maximum": 90}, steps=entries(INTEGER)),
        {"latitude": 47.3769, "steps": [3, 14, 159, 2653, 58979]},
    ),
    (
        record(plate={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"}, note={"type": ["string", "null"]}),
        {"plate": "ZH-4711", "note": None},
    ),
    (
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        {"name": "root", "children": [{"name": "left", "children": [{"name": "last", "children": []}]}]},
    ),
    (
        {"type": "object", "additionalProperties": {"anyOf": [TEXT, INTEGER, {"type": "boolean"}]}},
        {"host": "localhost", "port": 50051, "is secure": False, "comment": "The rest is left as it was.\n\tDone."},
    ),
    (
        {"anyOf": [record(kind={"const": "circle"}, radius=INTEGER), record(kind={"const": "square"}, side=INTEGER)]},
        {"kind": "square", "side": 12},
    ),
    (
        record(code=TEXT, language={"enum": ["python", "rust", "go"]}),
        {"code": "def f(x):\n    return {'x': x, \"y\": [x] * 3}\n", "language": "python"},
    ),
    (
        {"type": "object"},
        {"deep": {"list": [1, 2.5e-3, None, True, {"größe": "12 °C"}]}, "text": "Any JSON object will do here."},
    ),
)


UNENDING: Json = record(lines={"type": "array", "items": TEXT, "minItems": ROUND_TOKENS})


def memory_mb() -> float:
    """The most memory that this process has held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def compiled(compiler: Compiler, schema: Json, ends: tuple[int, ...]) -> tuple[Compiled, float]:
    """Returns the compiled schema, and the milliseconds of all threads until then."""
    began_s = time.process_time()
    found = compiler.compile(Grammar(json_schema=json.dumps(schema)), ends).result()
    return found, 1e3 * (time.process_time() - began_s)


def masks_ms(own: Compiled, text_ids: list[int], ends: tuple[int, ...], vocabulary_size: int) -> list[float]:
    """Returns the milliseconds of eight rows at each place of a text."""
    matcher, found = PathMatcher(own, ends, vocabulary_size), []
    for place in range(len(text_ids) + 1):
        draft = text_ids[place : place + ROWS - 1]
        began_s = time.thread_time()
        matcher.rows(text_ids[:place], draft)
        found.append(1e3 * (time.thread_time() - began_s))
    return found


def write_model(folder: Path, tokenizer: Path, vocabulary_size: int, end_token_id: int) -> None:
    """Writes a Llama of random weights, of the sizes of a model of 135 million parameters but for its vocabulary."""
    shape = Shape("masked", 576, 12, 9, 3, 1536, vocabulary_size, is_tied=True, positions=1024)
    model = plain_model(shape, torch.device("cpu"), torch.bfloat16)
    model.config.eos_token_id = model.generation_config.eos_token_id = end_token_id
    model.save_pretrained(folder)
    shutil.copy(tokenizer, folder / "tokenizer.json")


async def round_ms(address: str, requests: list[Request]) -> float:
    """Returns the mean milliseconds between the tokens of these texts, which run at once."""

    async def one(request: Request) -> float:
        times = []
        async with Client(address, resume_s=0.0) as client, aclosing(client.messages(request)) as messages:
            async for message in messages:
                times += [time.perf_counter()] * len(message.delta.token_ids)
        return (times[-1] - times[0]) / (len(times) - 1)

    return 1e3 * statistics.mean(await asyncio.gather(*map(one, requests)))


def rounds_with_and_without(folder: Path, pair_count: int) -> Ratio:
    """Returns the time of a round with a grammar over that without, of eight streams of one row each, in turns."""
    tokens = [*range(300, 300 + PROMPT_LENGTH)]
    asked: dict[str, Any] = {"max_tokens": ROUND_TOKENS, "temperature": 1.0, "policy": "off"}
    kinds: dict[bool, dict[str, Any]] = {
        True: {"grammar": {"json_schema": UNENDING}},
        False: {"ignore_eos": True},
    }
    found: list[float] = []
    with harness.running(folder, None) as services:
        for pair in track(range(pair_count + 1), "rounds with a grammar and without"):
            times = {}
            for masked in (True, False) if pair % 2 else (False, True):
                requests = [make_request(tokens, seed=seed, **asked, **kinds[masked]) for seed in range(ROWS)]
                times[masked] = asyncio.run(round_ms(services.coordinator.address, requests))
            if pair:  # the first warms up
                found.append(times[True] / times[False])
    return ratio_of(found)


def percentile(values: list[float], share: float) -> float:
    """Returns the value that this share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.masks", description=(__doc__ or "").splitlines()[0])
    default = EMBEDDED_MODELS / "target" / "tokenizer.json"
    parser.add_argument("--tokenizer", type=Path, default=default, help="a tokenizer.json (the embedded target's)")
    parser.add_argument("--end-token-id", type=int, default=0, help="of the model (%(default)s)")
    parser.add_argument("--pairs", type=int, default=15, help="of rounds with a grammar and without (%(default)s)")
    add_check_flag(parser)
    asked = parser.parse_args()
    console = Console(width=110)
    tokenizer = whole_tokenizer(asked.tokenizer)
    size, ends, before_mb = tokenizer.get_vocab_size(), (asked.end_token_id,), memory_mb()
    compiler = Compiler(lambda: asked.tokenizer)
    grammars = [compiled(compiler, schema, ends) for schema, _ in CASES]
    held_mb = memory_mb() - before_mb
    times: list[float] = []
    for (own, _), (_, value) in zip(grammars, CASES):
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        times += masks_ms(own, tokenizer.encode(text, add_special_tokens=False).ids, ends, size)
    later_ms = [ms for _, ms in grammars[1:]]
    table = Table(title=f"grammars for {size} tokens", title_justify="left")
    for name in ("", "median", "p90", "most"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("first grammar with its tokenizer, ms; MB", f"{grammars[0][1]:.0f}", f"{held_mb:.0f}", "")
    for name, values in (("further schemas, ms", later_ms), (f"masks of {ROWS} rows, ms", times)):
        row = statistics.median(values), percentile(values, 0.9), max(values)
        table.add_row(name, *(f"{value:.2f}" for value in row))
    console.print(table)
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch), asked.tokenizer, size, asked.end_token_id)
        ratio = rounds_with_and_without(Path(scratch), asked.pairs)
    bars = [
        Bar(f"masks of {ROWS} rows, p50, ms", P50_MS, statistics.median(times), f"{len(times)} places", is_limit=True),
        Bar(f"masks of {ROWS} rows, p90, ms", P90_MS, percentile(times, 0.9), is_limit=True),
        Bar("a further schema, ms", NEW_SCHEMA_MS, max(later_ms), is_limit=True),
        Bar(
            f"a round of {ROWS} streams, with a grammar / without", ROUND_RATIO, ratio.median, str(ratio), is_limit=True
        ),
    ]
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
