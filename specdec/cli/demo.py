"""`specdec demo`: three texts, each with speculation and then without, and a table of both.

It starts the services on free loopback ports, and stops them. Texts stream to the terminal as they are committed;
with --json only one object is printed. Times are the client's: a text's rate counts from its first message on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import TYPE_CHECKING, Any

from specdec.cli.chat import SESSIONS, template_of
from specdec.cli.demo_texts import RATIO_MEDIAN_MIN, RATIO_MIN, DemoSettings, DemoText, statistics_of
from specdec.client.request import Request, make_request
from specdec.config import ServeSettings
from specdec.folders import CHAT_HEAD, CHAT_MODEL, CHAT_PROMPTS, heldout_prompts
from specdec.streams import warn
from specdec.terminal import print_text

if TYPE_CHECKING:
    from specdec.launch.children import Child

PROMPT_IDS = (130, 191, 192)  # held-out prompts, chosen for readable texts, not for their speed
CHAT_PROMPT_IDS = (1, 18, 34)  # held-out questions
TIMEOUT_S = 120.0


def demo(settings: DemoSettings) -> int:
    """Runs the command; returns 1 if texts differ or --check fails. Raises SpecdecError."""
    from specdec.cli import demo_view
    from specdec.launch.serving import running

    texts, models = chat_texts() if settings.chat else embedded_texts()
    services = ServeSettings(
        **models,
        port=0,
        log_level="error",
        drain_grace_s=1.0,
        dtype=settings.dtype,
        max_num_seqs=SESSIONS,
    )
    with running(services) as serving:
        children = serving.children
        if settings.as_json:
            asyncio.run(measure(serving.address, settings, texts, nullcontext))
            print_text(json.dumps(report_of(settings, texts, children), indent=2))
        else:
            view = demo_view.DemoView()
            view.begin(settings, children)
            asyncio.run(measure(serving.address, settings, texts, view.streaming))
            view.conclude(texts, children)
    misses = misses_of(texts) if settings.check else []
    for miss in misses:
        warn(miss)
    return int(bool(misses) or not all(text.is_equal for text in texts))


def embedded_texts() -> tuple[list[DemoText], dict[str, Any]]:
    """Returns prompts of the embedded pair; the pair is what serve takes by default."""
    prompts = heldout_prompts()
    return [DemoText(prompt_id, prompts[prompt_id]) for prompt_id in PROMPT_IDS], {"threads": 1}


def chat_texts() -> tuple[list[DemoText], dict[str, Any]]:
    """Returns questions, and the chat model with its head as settings of serve. Raises ConfigError if the extra is not
    installed."""
    folder, template = template_of(CHAT_MODEL)
    questions = heldout_prompts(CHAT_PROMPTS)
    chosen = {own: questions[own] for own in CHAT_PROMPT_IDS}
    texts = [
        DemoText(own, f"{question}\n", template.encode([{"role": "user", "content": question}]))
        for own, question in chosen.items()
    ]
    return texts, {"model": str(folder), "draft_model": "none", "heads": str(CHAT_HEAD)}


async def measure(
    address: str,
    settings: DemoSettings,
    texts: Sequence[DemoText],
    shown: Callable[[DemoText], AbstractContextManager[Any]],
) -> None:
    """Generates the texts in turn, each within its `shown` context. Raises SpecdecError."""
    from specdec.client.stream import Client

    async with Client(address, resume_s=0.0) as client:
        for text in texts:
            with shown(text):
                for run in (text.on, text.off):
                    await client.read(request_of(text, settings, run is text.on), TIMEOUT_S, run)


def request_of(text: DemoText, settings: DemoSettings, speculative: bool) -> Request:
    """Returns the request of one of the text's generations."""
    return make_request(
        text.prompt_ids or text.prompt,
        max_tokens=settings.length,
        temperature=settings.temperature,
        seed=settings.seed,
        ignore_eos=not settings.chat,  # past the end of a text, so that all have the same length
        cache_salt="on" if speculative else "off",  # so that neither finds the other's text
        enabled=speculative,
    )


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
