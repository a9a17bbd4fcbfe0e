"""`specdec demo`: three texts, each with speculation and then without, and a table of both.

It starts the three services on free loopback ports, and stops them. Texts stream to the terminal as they are committed;
with --json only one object is printed. Times are the client's: a text's rate counts from its first message on.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from specdec.cli.chat import SESSIONS, template_of
from specdec.cli.request import GenerateSettings, build_request
from specdec.cli.streams import warn
from specdec.config import ServeSettings
from specdec.errors import ConfigError
from specdec.folders import CHAT_DRAFT, CHAT_MODEL, EMBEDDED_MODELS
from specdec.settings import MODEL, OUTPUT, SAMPLING, Settings, TlsSettings, setting
from specdec.terminal import print_text

if TYPE_CHECKING:
    import grpc

    from specdec.cli.processes import Child
    from specdec.v1 import coordinator_service_pb2 as coordinator_pb

PROMPT_IDS = (130, 191, 192)  # held-out prompts, chosen for readable texts, not for their speed
CHAT_PROMPT_IDS = (1, 18, 34)  # held-out questions
MAX_TOKENS, CHAT_MAX_TOKENS = 40, 96
RATIO_MEDIAN_MIN, RATIO_MIN = 1.25, 1.0  # of --check: the median of the texts, and each text
TIMEOUT_S = 120.0


class DemoSettings(Settings):
    """Sampling parameters of the texts, and the output format."""

    chat: bool = setting(False, MODEL, "Three questions to the chat model and its draft, instead of the embedded pair.")
    max_tokens: int | None = setting(
        None,
        SAMPLING,
        f"Output tokens of each text; absent: {MAX_TOKENS}, of an answer {CHAT_MAX_TOKENS}.",
        ge=2,
        le=1024,
    )
    temperature: float = setting(0.7, SAMPLING, "0 selects the likeliest token; the embedded pair then repeats itself.")
    seed: int = setting(4, SAMPLING, "Decides the texts, with speculation and without.", ge=0, le=(1 << 64) - 1)
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", MODEL, "Element type of weights and activations; auto selects the models' own."
    )
    as_json: bool = setting(False, OUTPUT, "Print only one JSON object of texts and statistics.")
    check: bool = setting(
        False,
        OUTPUT,
        f"Exit 1 unless speculation is {RATIO_MEDIAN_MIN:g} times as fast (median) and slows no text down.",
    )

    @property
    def length(self) -> int:
        """Output tokens of each text, at most."""
        return self.max_tokens or (CHAT_MAX_TOKENS if self.chat else MAX_TOKENS)


@dataclass(slots=True)
class Run:
    """One generation, filled while it streams. `pieces`: each token's text and kind."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[tuple[str, coordinator_pb.TokenKind]] = field(default_factory=list)
    statistics: coordinator_pb.Statistics | None = None
    first_count: int = 0  # tokens of the first message, before the clock started
    first_s: float = 0.0
    last_s: float = 0.0

    def add(self, delta: coordinator_pb.Delta, now_s: float) -> None:
        """Adds committed tokens, received at `now_s`."""
        from specdec.cli.generate import pieces_of

        if not self.token_ids:
            self.first_count, self.first_s = len(delta.token_ids), now_s
        self.token_ids += delta.token_ids
        self.pieces += pieces_of(delta)
        self.last_s = now_s

    @property
    def text(self) -> str:
        """The text generated so far."""
        return "".join(piece for piece, _ in self.pieces)

    @property
    def tokens_per_s(self) -> float:
        """Rate after the first message; 0 before the second."""
        return rate_of([self])


def rate_of(runs: Sequence[Run]) -> float:
    """Returns tokens per second of all runs, each counted from its first message on; 0 before any has a second."""
    seconds = sum(run.last_s - run.first_s for run in runs)
    return sum(len(run.token_ids) - run.first_count for run in runs) / seconds if seconds > 0 else 0.0


@dataclass(slots=True)
class DemoText:
    """A prompt and its two generations, with speculation (`on`) and right after it without (`off`). `prompt` is shown,
    and sent unless the request has `prompt_ids`."""

    prompt_id: int
    prompt: str
    prompt_ids: tuple[int, ...] = ()
    on: Run = field(default_factory=Run)
    off: Run = field(default_factory=Run)

    @property
    def ratio(self) -> float:
        """Speedup by speculation; 0 before both have a rate."""
        return statistics_of([self])["ratio"]

    @property
    def is_equal(self) -> bool:
        """Whether both have the same tokens, as required."""
        return self.on.token_ids == self.off.token_ids


def heldout_prompts(name: str = "heldout_prompts.jsonl") -> dict[int, str]:
    """Returns the held-out prompts of a file beside the embedded pair by id. Raises ConfigError without the file."""
    file = EMBEDDED_MODELS / name
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"the held-out prompts, {file}, cannot be read: {error.strerror}") from error
    return {entry["id"]: entry["prompt"] for entry in map(json.loads, lines)}


def demo(settings: DemoSettings) -> int:
    """Runs the command; returns 1 if texts differ or --check fails. Raises SpecdecError."""
    from specdec.cli import demo_view, serve

    texts, models = chat_texts() if settings.chat else embedded_texts()
    services = ServeSettings(
        **models,
        port=0,
        threads=1,
        log_level="error",
        drain_grace_s=1.0,
        dtype=settings.dtype,
        max_num_seqs=SESSIONS,
    )
    with serve.running(services, []) as (coordinator, target, draft, _):
        children = [child for child in (target, draft, coordinator) if child is not None]
        if settings.as_json:
            asyncio.run(measure(coordinator.address, settings, texts, nullcontext))
            print_text(json.dumps(report_of(settings, texts, children), indent=2))
        else:
            view = demo_view.DemoView()
            view.begin(settings, children)
            asyncio.run(measure(coordinator.address, settings, texts, view.streaming))
            view.conclude(texts, children)
    misses = misses_of(texts) if settings.check else []
    for miss in misses:
        warn(miss)
    return int(bool(misses) or not all(text.is_equal for text in texts))


def embedded_texts() -> tuple[list[DemoText], dict[str, Any]]:
    """Returns prompts of the embedded pair; the pair is what serve takes by default."""
    prompts = heldout_prompts()
    return [DemoText(prompt_id, prompts[prompt_id]) for prompt_id in PROMPT_IDS], {}


def chat_texts() -> tuple[list[DemoText], dict[str, Any]]:
    """Returns questions, and the chat pair as settings of serve. Raises ConfigError if the extra is not installed."""
    folder, template = template_of(CHAT_MODEL)
    questions = heldout_prompts("chat_prompts.jsonl")
    chosen = {own: questions[own] for own in CHAT_PROMPT_IDS}
    texts = [
        DemoText(own, f"{question}\n", template.encode([{"role": "user", "content": question}]))
        for own, question in chosen.items()
    ]
    return texts, {"model": str(folder), "draft_model": str(CHAT_DRAFT)}


async def measure(
    address: str,
    settings: DemoSettings,
    texts: Sequence[DemoText],
    shown: Callable[[DemoText], AbstractContextManager[Any]],
) -> None:
    """Generates the texts in turn, each within its `shown` context. Raises SpecdecError."""
    from specdec.rpc.client import open_channel

    channel = open_channel(address, TlsSettings())
    try:
        for text in texts:
            with shown(text):
                await generate(channel, text, settings, True)
                await generate(channel, text, settings, False)
    finally:
        await channel.close()


async def generate(channel: grpc.aio.Channel, text: DemoText, settings: DemoSettings, speculative: bool) -> None:
    """Runs one of the text's generations. Raises SpecdecError."""
    own: dict[str, Any] = {
        "max_tokens": settings.length,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "ignore_eos": not settings.chat,  # past the end of a text, so that all have the same length
        "cache_salt": "on" if speculative else "off",  # so that neither finds the other's text
    }
    told = GenerateSettings(**own, prompt_ids=text.prompt_ids, speculative=speculative)
    request = build_request(told, None if text.prompt_ids else text.prompt)
    await fill(text.on if speculative else text.off, channel, request)


async def fill(run: Run, channel: grpc.aio.Channel, request: coordinator_pb.GenerateRequest) -> None:
    """Runs a generation. Raises SpecdecError."""
    from specdec.cli.generate import METHOD
    from specdec.rpc.client import call_stream
    from specdec.v1 import coordinator_service_pb2 as coordinator_pb

    async with aclosing(call_stream(channel, METHOD, request, coordinator_pb.GenerateResponse, TIMEOUT_S)) as responses:
        async for response in responses:
            if response.HasField("delta"):
                run.add(response.delta, time.perf_counter())
            elif response.HasField("finished"):
                run.statistics = response.finished.statistics


def statistics_of(texts: Sequence[DemoText]) -> dict[str, float]:
    """Returns statistics of the texts together; acceptance, length and bytes are of generations with speculation."""
    on, off = rate_of([text.on for text in texts]), rate_of([text.off for text in texts])
    totals = [text.on.statistics for text in texts if text.on.statistics]
    drafted = sum(entry.num_draft_tokens for entry in totals)
    accepted = sum(entry.num_accepted_draft_tokens for entry in totals)
    steps = sum(entry.num_spec_steps for entry in totals)
    link_bytes = sum(entry.draft_link_bytes for entry in totals)
    return {
        "on_tokens_per_s": on,
        "off_tokens_per_s": off,
        "ratio": on / off if off else 0.0,
        "acceptance": accepted / drafted if drafted else 0.0,
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_link_bytes_per_token": link_bytes / max(1, sum(len(text.on.token_ids) for text in texts)),
    }


def report_of(settings: DemoSettings, texts: Sequence[DemoText], services: Sequence[Child]) -> dict[str, Any]:
    """Returns the object that --json prints."""
    own = [
        {
            "prompt_id": text.prompt_id,
            "prompt": text.prompt,
            "text": text.on.text,
            "on_token_ids": text.on.token_ids,
            "off_token_ids": text.off.token_ids,
            "is_equal": text.is_equal,
            **statistics_of([text]),
        }
        for text in texts
    ]
    given = settings.model_dump(include={"chat", "temperature", "seed", "dtype"})
    return {
        **given,
        "max_tokens": settings.length,
        "is_equal": all(text.is_equal for text in texts),
        **statistics_of(texts),
        "memory_peak_bytes": {child.command: child.memory_peak_bytes for child in services},
        "texts": own,
    }


def misses_of(texts: Sequence[DemoText]) -> list[str]:
    """Returns a message for each missed limit of --check."""
    bars = {"the median of the texts": (median(text.ratio for text in texts), RATIO_MEDIAN_MIN)}
    bars |= {f"prompt {text.prompt_id}": (text.ratio, RATIO_MIN) for text in texts}
    return [
        f"{name}: {ratio:.2f} times as fast with speculation, it must be at least {bound:g}"
        for name, (ratio, bound) in bars.items()
        if ratio < bound
    ]
