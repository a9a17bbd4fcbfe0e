"""The texts of the demo: its settings, both generations of each prompt, and their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from specdec.settings import MODEL, OUTPUT, SAMPLING, Settings, setting

if TYPE_CHECKING:
    from specdec.v1 import coordinator_service_pb2 as coordinator_pb

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
