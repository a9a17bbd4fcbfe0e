"""Not-a-number at one row in a thousand: these requests end INTERNAL without a wrong token, the others are unharmed."""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import tempfile
from pathlib import Path
from typing import Any

import grpc
import torch
from rich.console import Console

from bench.bars import Bar
from specdec.engine.table_model import write_table_model
from tests.chaos.clients import Stream, prompts, read, with_stub
from tests.chaos.texts import Text
from tests.support import harness
from tests.support.services import SHAPES

VOCABULARY_SIZE = 32
PLANTED_SHARE = 0.001  # of the rows that decide tokens of the texts


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its sizes."""
    parser.add_argument("--requests", type=int, default=600, help="requests (%(default)s)")
    parser.add_argument("--tokens", type=int, default=120, help="tokens of each (%(default)s)")
    parser.add_argument("--width", type=int, default=32, help="requests at a time (%(default)s)")


def pairs_of(text: Text, token_ids: list[int]) -> list[tuple[int, int]]:
    """The row that decides each token of a text: named by the two tokens before it."""
    assert not isinstance(text.prompt, str)
    path = [*text.prompt, *token_ids]
    return list(itertools.pairwise(path[len(text.prompt) - 2 : -1]))


def write_models(folder: Path, planted: tuple[int, int] | None) -> None:
    """Writes a target, sound or with one row of not-a-number, and a draft that resembles it."""
    size, chance = VOCABULARY_SIZE + 1, torch.Generator().manual_seed(1)
    logits = torch.randn((size, size, VOCABULARY_SIZE), generator=chance) * 2
    write_table_model(folder / "draft", VOCABULARY_SIZE, logits=logits + torch.randn(logits.shape, generator=chance))
    if planted is not None:
        logits[planted] = torch.nan
    write_table_model(folder / "target", VOCABULARY_SIZE, logits=logits)


def requests_of(count: int, token_count: int) -> list[Text]:
    """Half GREEDY, half COUPLED."""
    own = prompts(count, 3, VOCABULARY_SIZE)
    return [Text(prompt, float(number % 4 > 0), number, token_count, True) for number, prompt in enumerate(own)]


def run(address: str, texts: list[Text], width: int, shapes: list[dict[str, Any]]) -> list[Stream]:
    """Runs the requests, `width` at a time."""

    async def work(stub: Any) -> list[Stream]:
        slots = asyncio.Semaphore(width)

        async def one(number: int, text: Text) -> Stream:
            async with slots:
                return await read(stub, text.request(shapes[number % len(shapes)]))

        return list(await asyncio.gather(*(one(number, text) for number, text in enumerate(texts))))

    return with_stub(address, work)


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Compares the streams beside planted rows with those of a sound target without a draft."""
    texts = requests_of(asked.requests, asked.tokens)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder, None)
        with harness.running(folder / "target", None, threads=1) as services:
            expected = [one.token_ids for one in run(services.coordinator.address, texts, asked.width, [SHAPES["off"]])]
        rows = collections.Counter(pair for text, tokens in zip(texts, expected) for pair in pairs_of(text, tokens))
        usual = PLANTED_SHARE * rows.total()
        planted = min(rows, key=lambda pair: abs(rows[pair] - usual))
        write_models(folder, planted)
        with harness.running(folder / "target", folder / "draft", threads=1) as services:
            found = run(services.coordinator.address, texts, asked.width, list(SHAPES.values()))
    touched = [planted in pairs_of(text, tokens) for text, tokens in zip(texts, expected)]
    failed = [one.error is not None for one in found]
    codes = {one.error.code().name for one in found if one.error is not None}
    console.print(f"{rows[planted]} of {rows.total()} rows are planted; {sum(failed)} requests failed: {codes}")
    garbage = sum(one.token_ids != tokens[: len(one.token_ids)] for one, tokens in zip(found, expected))
    whole = sum(one.token_ids != tokens for one, tokens in zip(found, expected) if one.error is None)
    internal = sum(one.error.code() is not grpc.StatusCode.INTERNAL for one in found if one.error is not None)
    silent = sum("resume.output_token_ids" not in str(one.error.details()) for one in found if one.error is not None)
    return [
        Bar("requests that met a planted row", 1, sum(touched)),
        Bar("of them not failed", 0, sum(hit and not bad for hit, bad in zip(touched, failed)), is_limit=True),
        Bar("failed without INTERNAL", 0, internal, is_limit=True),
        Bar("failed without how to resume", 0, silent, is_limit=True),
        Bar("streams with a wrong token", 0, garbage, is_limit=True),
        Bar("finished texts that differ", 0, whole, f"of {len(found) - sum(failed)}", is_limit=True),
        Bar("finished texts", 1, len(found) - sum(failed)),
    ]
