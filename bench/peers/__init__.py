"""specdec beside what people serve with: vLLM, llama.cpp and `transformers` on the same weights and cores.

Each system runs plain and with its own speculation at the best of a few settings, found on other prompts
(`systems.py`). All servers are loaded, one works at a time, in turns prompt by prompt; whole requests by the client's
clock. Peers come from environments of their own (`make peers`, or the first run).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer

from bench.bars import Bar
from bench.peers.clients import measured
from bench.peers.systems import Model, Serving, grids, tuned
from bench.prompts import prose_prompts
from bench.results import Cell, Ratio, Results, Table, shown
from bench.runner import Contender, Prepared, Values
from bench.step.gguf_file import write_gguf
from specdec.chat.template import ChatTemplate
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import ConfigError
from specdec.folders import CHAT_HEAD, CHAT_MODEL, chat_file
from tests.support.deepened import write_deepened
from tests.support.harness import DRAFT_MODEL, heldout_prompts
from tests.support.unpacked import write_unpacked

DEEPENED, CHAT, CHAT_4 = "deepened", "chat", "chat, 4 bits"
HEATS = {"GREEDY": 0.0, "temperature 0.7, seed": 0.7}
STREAMS = (1, 8, 32)
TOKENS = 96
TUNING_COUNT = 4  # prompts for settings, from the end: they are not measured
PLAIN = {"llama.cpp": "llama.cpp", "vLLM": "vLLM", "transformers": "transformers"}
AUTO, OFF = "specdec, auto", "specdec, off"


class Peers:
    """See the module."""

    name = "peers"
    about = "specdec, vLLM, llama.cpp and transformers on the same weights and two cores, one measured at a time"
    turns, quick_turns, minutes = 10, 2, 90

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--models", nargs="+", default=[DEEPENED, CHAT, CHAT_4], help="(%(default)s)")
        parser.add_argument("--without", nargs="+", default=[], help="systems by the start of their names")

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        one = [{"model": model, "rule": rule, "streams": 1} for model in asked.models for rule in HEATS]
        many = [{"model": model, "rule": "GREEDY", "streams": n} for model in asked.models for n in STREAMS[1:]]
        found: list[Cell] = [*one, *many]
        found.sort(key=lambda cell: asked.models.index(cell["model"]))  # servers of one model at a time
        return found[:: len(found) // len(asked.models)] if asked.quick else found

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        with TemporaryDirectory() as scratch, ExitStack() as stack:
            loaded: dict[str, dict[str, Serving]] = {}
            prompts: list[list[int]] = []

            def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
                name, count = str(cell["model"]), int(cell["streams"])
                if name not in loaded:
                    stack.close()
                    loaded.clear()
                    model, prompts[:] = made(name, Path(scratch))
                    loaded[name] = started(stack, model, prompts[-TUNING_COUNT:], asked, results)
                servers = {own: serving for own, serving in loaded[name].items() if count == 1 or has_batches(own)}
                return {own: partial(turn, serving, cell, prompts) for own, serving in servers.items()}

            yield contenders

    def tables(self, results: Results) -> list[Table]:
        return [one_stream(results), many_streams(results)]

    def bars(self, results: Results) -> list[Bar]:
        return [*against_best(results), *against_plain(results)]


def has_batches(system: str) -> bool:
    """Whether it serves several streams at once."""
    return not system.startswith("transformers")


def made(name: str, scratch: Path) -> tuple[Model, list[list[int]]]:
    """Writes a model in every form that a system reads; returns it with token ids of prompts."""
    folder = scratch / name.replace(", ", "-").replace(" ", "-")
    if name == DEEPENED:
        dense = write_deepened(folder)
        files = write_gguf(dense, folder.with_suffix(".gguf")), write_gguf(DRAFT_MODEL, scratch / "draft.gguf")
        model = Model(name, str(dense), files[0], dense, DRAFT_MODEL, files[1])
    elif name == CHAT:
        dense = write_unpacked(CHAT_MODEL, folder)
        model = Model(name, str(dense), write_gguf(dense, folder.with_suffix(".gguf")), dense, heads=CHAT_HEAD)
    else:
        file = chat_file()
        if file is None:
            raise ConfigError(f"the chat model {CHAT_MODEL} is not installed: make .venv/.chat-installed")
        model = Model(name, CHAT_MODEL, file, None, heads=CHAT_HEAD)
    return model, prompts_of(open_model_folder(model.folder).path)


def prompts_of(folder: Path) -> list[list[int]]:
    """Questions to a chat model, or held-out prompts to another."""
    template = ChatTemplate.read(folder)
    if template is not None:
        return [list(template.encode([{"role": "user", "content": own.prompt}])) for own in prose_prompts()]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in heldout_prompts().values()]


def started(
    stack: ExitStack, model: Model, tuning: Sequence[Sequence[int]], asked: argparse.Namespace, results: Results
) -> dict[str, Serving]:
    """Finds the settings of every system, then starts all. A system that does not start is left out, with its reason
    in the notes."""
    servers: dict[str, Serving] = {}
    notes = results.notes.setdefault(model.name, {})
    for name, (start, grid) in grids(model).items():
        if name.startswith(tuple(asked.without) or "-"):
            continue
        try:
            settings, failed = tuned(start, grid, model, tuning[:1] if asked.quick else tuning)
            notes[name] = {"settings": shown_settings(settings), "not started": failed}
            servers[name] = stack.enter_context(start(model, **settings))
        except ConfigError as error:
            notes[name] = {"settings": "", "not started": [str(error)]}
    for server, _ in servers.values():
        server.pause()
    return servers


def shown_settings(settings: dict[str, Any]) -> str:
    """As the table tells them."""
    speculation = settings.get("speculation")
    flat = {**settings, **speculation} if isinstance(speculation, dict) else settings
    left_out = ("policy", "model", "draft_model", "method", "prompt_lookup_min", "prompt_lookup_max")
    told = {name: value for name, value in flat.items() if name not in left_out and not isinstance(value, Path)}
    return ", ".join(f"{name} {value}" for name, value in told.items() if not isinstance(value, dict))


def turn(serving: Serving, cell: Cell, prompts: Sequence[Sequence[int]], number: int) -> Values:
    """One prompt, or as many as there are streams, all at once."""
    server, ask = serving
    count = int(cell["streams"])
    chosen = [prompts[(number * count + place) % (len(prompts) - TUNING_COUNT)] for place in range(count)]
    return measured(server, ask, chosen, TOKENS, HEATS[str(cell["rule"])])


def equal_texts(results: Results, cell: Cell, system: str) -> str:
    """How many of a system's texts are those of its plain decoding."""
    plain = OFF if system == AUTO else PLAIN.get(system.partition(",")[0], "")
    samples = results.samples(cell)
    if system == plain or plain not in samples:
        return ""
    pairs = list(zip(samples[system]["digest"], samples[plain]["digest"]))
    return f"{sum(own == other for own, other in pairs)} of {len(pairs)}"


def over(results: Results, cell: Cell, system: str, other: str) -> Ratio | None:
    return results.ratio(cell, system, other, "tokens_per_s")


def one_stream(results: Results) -> Table:
    """A line per model, rule and system."""
    rows = []
    for cell in results.cells(streams=1):
        for system in results.samples(cell):
            numbers = [
                shown(results.median(cell, system, name))
                for name in ("tokens_per_s", "first_token_ms", "cpu_ms_per_token", "memory_mb")
            ]
            ratio = over(results, cell, AUTO, system) if system != AUTO else None
            settings = results.notes.get(str(cell["model"]), {}).get(system, {}).get("settings", "")
            equal = equal_texts(results, cell, system)
            first = [f"{cell['model']}, {cell['rule']}", system, settings]
            rows.append([*first, *numbers, equal, ratio.short() if ratio else ""])
    columns = ["model, rule", "system", "settings", "tokens/s", "first token, ms", "CPU ms a token", "MB"]
    about = "one stream; texts equal to those of the same system without speculation; specdec, auto over it"
    return Table("one_stream", about, [*columns, "equal texts", "auto over it"], rows)


def many_streams(results: Results) -> Table:
    """A line per model and system: tokens a second of 1, 8 and 32 streams together."""
    rows = []
    for model in dict.fromkeys(str(cell["model"]) for cell in results.cells(rule="GREEDY")):
        cells: list[Cell] = [{"model": model, "rule": "GREEDY", "streams": count} for count in STREAMS]
        for system in dict.fromkeys(own for cell in cells for own in results.samples(cell) if has_batches(own)):
            ratios = [over(results, cell, AUTO, system) if system != AUTO else None for cell in cells]
            rates = [shown(results.median(cell, system, "tokens_per_s")) for cell in cells]
            rows.append([model, system, *rates, *(ratio.short() if ratio else "" for ratio in ratios[1:])])
    columns = ["model", "system", *(f"{count} streams" for count in STREAMS)]
    over_it = [f"auto over it, {count} streams" for count in STREAMS[1:]]
    return Table("many_streams", "greedy, tokens/s of all streams together", [*columns, *over_it], rows)


def against_best(results: Results) -> Iterator[Bar]:
    """Auto over the best configuration of each peer on the deepened pair."""
    for count in STREAMS[:2]:
        cell: Cell = {"model": DEEPENED, "rule": "GREEDY", "streams": count}
        for peer in PLAIN:
            own = [name for name in results.samples(cell) if name.startswith(peer)]
            best = max(own, key=lambda name: results.median(cell, name, "tokens_per_s") or 0.0, default=None)
            ratio = over(results, cell, AUTO, best) if best else None
            claim, told = f"auto / best of {peer}, {count} streams", f"{best}: {ratio}"
            yield Bar(f"{claim}: median", 1.5, ratio.median if ratio else None, told, stretch=3.0)
            yield Bar(f"{claim}: lower end of the interval", 1.1, ratio.low if ratio else None, told)


def against_plain(results: Results) -> Iterator[Bar]:
    """Plain decoding over theirs on both models."""
    for model in (DEEPENED, CHAT):
        for peer in PLAIN:
            ratio = over(results, {"model": model, "rule": "GREEDY", "streams": 1}, OFF, peer)
            yield Bar(f"off / plain {peer}, {model}", 1.3, ratio.median if ratio else None, str(ratio or ""))


BENCHMARK = Peers()
