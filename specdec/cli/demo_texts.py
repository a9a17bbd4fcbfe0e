"""The texts of the demo: its settings, both generations of each prompt, and their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from specdec.client.run import Run, acceptance_of, rate_of
from specdec.settings import MODEL, OUTPUT, SAMPLING, Settings, setting

MAX_TOKENS, CHAT_MAX_TOKENS = 40, 96
RATIO_MEDIAN_MIN, RATIO_MIN = 1.25, 1.0  # of --check: the median of the texts, and each text


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


def statistics_of(texts: Sequence[DemoText]) -> dict[str, float]:
    """Returns statistics of the texts together; acceptance, length and bytes are of generations with speculation."""
    on, off = rate_of([text.on for text in texts]), rate_of([text.off for text in texts])
    ended = [text.on.statistics for text in texts if text.on.finished]
    acceptance, length = acceptance_of(ended)
    return {
        "on_tokens_per_s": on,
        "off_tokens_per_s": off,
        "ratio": on / off if off else 0.0,
        "acceptance": acceptance,
        "mean_acceptance_length": length,
        "draft_link_bytes_per_token": sum(own.draft_link_bytes for own in ended)
        / max(1, sum(len(text.on.token_ids) for text in texts)),
    }
