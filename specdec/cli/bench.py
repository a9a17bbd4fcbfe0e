"""`specdec bench`: load on a coordinator that serves, and whether speculation pays there.

Blocks of requests are answered with speculation and without in turns, each with the same prompts, seeds and arrivals,
so that what changes on the machines meets both. A block begins when the one before it has ended. A text finds in no
cache what the other way made of its prompt; prompts that share a beginning share it as they do when they are served.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from specdec import __version__
from specdec.cli.request import TextSettings, fields_of, naming_address
from specdec.client.request import Request, make_request
from specdec.errors import ConfigError
from specdec.protocol.limits import UINT64_MAX
from specdec.protocol.request import SamplingParams, SpeculationMode, SpeculativePolicy
from specdec.settings import LIMITS, OUTPUT, PROMPT, SPECULATION, setting, split_values
from specdec.streams import warn

if TYPE_CHECKING:
    from specdec.cli.bench_prompts import Prompt
    from specdec.client.load import Block, Measured
    from specdec.client.stream import Client

TURNS = 12  # of which the interval of the median leaves out the two extremes on each side
UNLIMITED = 8  # requests of a block without a limit of those at once, by default
UNTOLD = {"ssl_certfile", "ssl_keyfile", "ssl_ca_certs"}  # settings that are not written
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
Concurrency = Annotated[int, Field(ge=1, le=4096)]
Concurrencies = Annotated[tuple[Concurrency, ...], BeforeValidator(split_values), Field(max_length=16)]


class BenchSettings(TextSettings):
    """The load, what is measured, and how the texts are generated."""

    prompts: Path | None = setting(
        None,
        PROMPT,
        "File with a prompt a line, or a .jsonl file with an object a line that has prompt or messages; sent in its "
        "order, again from the first after the last. Absent: the shipped held-out prompts, which are code.",
    )
    num_prompts: int | None = setting(
        None,
        PROMPT,
        "Requests at each concurrency, with speculation and without each. Absent: as many in each turn as may be at "
        f"once, {UNLIMITED} if that has no limit.",
        ge=1,
        le=1_000_000,
    )
    model: str = setting(
        "", PROMPT, "Folder, GGUF file or hub id of the model served, whose chat template messages are written with."
    )
    concurrency: Concurrencies = setting(
        (),
        LIMITS,
        "Most requests at once; several values are measured one after another. Absent: 1; with --rate no limit.",
        metavar="N",
        several=True,
    )
    rate: float = setting(
        float("inf"),
        LIMITS,
        "Requests a second that arrive, as a Poisson process with --seed; inf: one as soon as another has ended.",
        gt=0,
    )
    turns: int = setting(
        TURNS,
        LIMITS,
        "Blocks that the requests are divided into; one with speculation and one without take turns, and the interval "
        "is over these. One more before them is not counted.",
        ge=1,
        le=1000,
    )
    only: Literal["on", "off"] | None = setting(
        None, SPECULATION, "Measure with speculation only, or without only, all requests in one block. Absent: both."
    )
    timeout_s: float | None = setting(
        None, LIMITS, "Maximum seconds for a request, which fails then; absent: no limit.", gt=0
    )
    as_json: Path | None = setting(
        None, OUTPUT, "File for settings, metrics and the times of every request.", metavar="FILE"
    )
    picture: Path | None = setting(
        None, OUTPUT, "File for a picture of the metrics, .png, .svg or .pdf; needs matplotlib.", metavar="FILE"
    )

    @model_validator(mode="after")
    def _check_ways(self) -> BenchSettings:
        given = {"--policy off": self.policy == "off", "--no-speculative": self.speculative is False}
        named = [name for name, is_given in given.items() if is_given]
        if named and self.only != "off":
            raise ValueError(f"{named[0]} is plain decoding: give --only off, or leave it out to measure both ways")
        if self.n not in (None, 1):
            raise ValueError(f"--n is {self.n}; it must be 1: a request has one text here")
        return self

    @property
    def ways(self) -> tuple[str, ...]:
        """What is measured in turns."""
        return ("on", "off") if self.only is None else (self.only,)

    @property
    def loads(self) -> tuple[int, ...]:
        """The most requests at once of each measurement; 0: no limit."""
        return self.concurrency or ((1,) if self.rate == float("inf") else (0,))


def bench(settings: BenchSettings) -> int:
    """Runs the command; returns 1 if every request failed. Raises SpecdecError; KeyboardInterrupt after the tables of
    what was measured by then."""
    from specdec.cli import bench_view
    from specdec.cli.bench_prompts import read_prompts

    check_outputs(settings)
    check_texts(settings)
    plan = Plan(settings, read_prompts(settings.prompts, settings.model))
    cells: list[Measured] = []
    began_s = time.time()
    interruption: KeyboardInterrupt | None = None
    try:
        with naming_address(settings), bench_view.progress(plan.request_count) as show:
            asyncio.run(measure(plan, cells, show))
    except KeyboardInterrupt as error:
        interruption = error
    cells = [cell for cell in cells if any(block.answers for block in cell.blocks)]
    if cells:
        report = bench_view.report_of(settings.ways, settings.rate, cells)
        bench_view.print_report(report, interruption is not None)
        write_outputs(settings, began_s, report, cells)
    failures = [answer.failure for cell in cells for block in cell.blocks for answer in block.answers]
    reason = next((failure for failure in failures if failure is not None), None)
    if reason is not None:
        warn(f"{len(failures) - failures.count(None)} of {len(failures)} requests failed, the first one: {reason}")
    if interruption is not None:
        raise interruption
    return int(None not in failures)


def check_outputs(settings: BenchSettings) -> None:
    """Raises ConfigError for a file that cannot be written, and for a picture that cannot be drawn."""
    for flag, file in (("--json", settings.as_json), ("--picture", settings.picture)):
        if file is None:
            continue
        if file.is_dir() or not file.absolute().parent.is_dir():
            raise ConfigError(f"{flag} is {file}; it must be a file in a folder that exists")
        if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            raise ConfigError(f"{flag} is {file}, which this user may not write")
    if settings.picture is not None:
        if settings.picture.suffix not in PICTURE_SUFFIXES:
            raise ConfigError(f"--picture is {settings.picture}; its name must end with {', '.join(PICTURE_SUFFIXES)}")
        if find_spec("matplotlib") is None:
            raise ConfigError("--picture needs matplotlib: pip install 'specdec[bench]'")


def check_texts(settings: BenchSettings) -> None:
    """Raises InvalidRequest for a field of the texts outside its limits, as far as these do not depend on the model."""
    given = {name: own for name, own in fields_of(settings).items() if own not in (None, [], ())}
    sampling = {name: given[name] for name in given if name in SamplingParams.__dataclass_fields__}
    SamplingParams(**{name: own for name, own in sampling.items() if name != "grammar"})
    speculation = {name: given[name] for name in given if name in SpeculativePolicy.__dataclass_fields__}
    mode = SpeculationMode[settings.policy.upper()] if settings.policy else None
    left_out = ("rule", "proposers")  # the schema has checked their words
    SpeculativePolicy(mode=mode, **{name: own for name, own in speculation.items() if name not in left_out})


class Plan:
    """The requests of a run."""

    def __init__(self, settings: BenchSettings, prompts: Sequence[Prompt]) -> None:
        self.settings = settings
        self._prompts, self._fields = prompts, fields_of(settings)
        self._salt = secrets.token_hex(8)  # what an earlier run left in caches is not found
        self._seed = settings.seed or 0

    def sizes(self, concurrency: int) -> list[int]:
        """Returns the number of requests of each block of a way, that of the block that warms up first."""
        turns = self.settings.turns
        count = self.settings.num_prompts or turns * (concurrency or UNLIMITED)
        if len(self.settings.ways) == 1:
            return [min(count, concurrency or UNLIMITED), count]
        turns = min(turns, count)
        ends = [turn * count // turns for turn in range(turns + 1)]
        own = [after - before for before, after in zip(ends, ends[1:])]
        return [min(own[0], concurrency or UNLIMITED), *own]

    @property
    def request_count(self) -> int:
        """All that will be sent."""
        return len(self.settings.ways) * sum(sum(self.sizes(own)) for own in self.settings.loads)

    def requests(self, concurrency: int, way: str, turn: int, first: int, count: int) -> list[tuple[int, Request]]:
        """Returns the requests of a block with their numbers, from `first` on."""
        return [
            (number, self._request(f"{concurrency} {way} {'first' if turn == 0 else ''}", way, number))
            for number in range(first, first + count)
        ]

    def _request(self, salt: str, way: str, number: int) -> Request:
        """Both ways have the same seed; a prompt that comes again does not find its text of the time before."""
        again, place = divmod(number, len(self._prompts))
        own = {"seed": (self._seed + number) & UINT64_MAX, "enabled": False if way == "off" else None}
        return make_request(
            self._prompts[place],
            label=f"bench {way}",
            cache_salt=f"{self._salt} {salt} {again}",
            **{**self._fields, **own},
        )


async def measure(plan: Plan, cells: list[Measured], show: Callable[[str, int], None]) -> None:
    """Measures each concurrency, and adds what was measured to `cells` as it comes. Raises the first error of the
    first requests if all of them fail: then the rest would."""
    from specdec.client.load import Block, Measured, arrivals, run_block
    from specdec.client.stream import Client

    settings = plan.settings

    async def run(client: Client, cell: Measured, block: Block, first: int, count: int) -> None:
        due_s = arrivals(count, settings.rate, (settings.seed or 0) + block.turn)
        requests = plan.requests(cell.concurrency, block.way, block.turn, first, count)
        name = "warms up" if block.turn == 0 else f"turn {block.turn}"
        load = f"{cell.concurrency} at once, " if cell.concurrency else ""
        show(f"{load}{block.way}, {name}", 0)
        await run_block(client, block, requests, due_s, cell.concurrency, settings.timeout_s, lambda: show("", 1))

    async with Client(settings.address, settings, resume_s=0.0) as client:
        for concurrency in settings.loads:
            cell, first = Measured(concurrency), 0
            for turn, count in enumerate(plan.sizes(concurrency)):
                for way in settings.ways[:: 1 if turn % 2 else -1]:
                    block = Block(way, turn)
                    if turn:
                        cell.blocks.append(block)
                    await run(client, cell, block, first, count)
                    failures = [answer.failure for answer in block.answers if answer.failure is not None]
                    if not cells and turn == 0 and len(failures) == count:
                        raise failures[0]
                if turn == 0:
                    cells.append(cell)
                else:
                    first += count


def write_outputs(settings: BenchSettings, began_s: float, report: dict[str, Any], cells: Sequence[Measured]) -> None:
    """Writes the files that are asked for."""
    from specdec.cli.bench_view import draw

    if settings.picture is not None:
        draw(report, settings.picture)
    if settings.as_json is None:
        return
    run = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(began_s)),
        "version": __version__,
        "settings": settings.model_dump(mode="json", exclude=UNTOLD, exclude_defaults=True),
    }
    blocks = [[described(block) for block in cell.blocks] for cell in cells]
    told = [own | {"blocks": theirs} for own, theirs in zip(report["cells"], blocks, strict=True)]
    text = json.dumps({"run": run, **report, "cells": told})
    settings.as_json.write_text(text + "\n", encoding="utf-8")


def described(block: Block) -> dict[str, Any]:
    """Returns a block as JSON has it; times are seconds from its beginning, deltas a time and a number of tokens."""

    def since(moment_s: float) -> float:
        return round(moment_s - block.began_s, 6)

    requests = [
        {
            "number": answer.number,
            "sent_s": since(answer.sent_s),
            "ended_s": since(answer.ended_s),
            "deltas": [(since(moment_s), count) for moment_s, count in answer.deltas],
            "input_tokens": answer.finished.prompt_tokens if answer.finished else 0,
            "failure": str(answer.failure or ""),
        }
        for answer in block.answers
    ]
    return {"way": block.way, "turn": block.turn, "is_complete": block.is_complete, "requests": requests}
