"""Assisted generation of `transformers` in this process, at its own best settings."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.prompt_lookup import generate, load

LENGTHS, CONFIDENCES = (1, 2, 3, 4, 6, 8), (0.0, 0.4, 0.6)
SCHEDULES = ("heuristic", "heuristic_transient")  # they begin at a length and go on by themselves
SCHEDULED_LENGTHS = (3, 5)
FINALISTS, FINAL_REPEATS = 4, 3


@dataclass(frozen=True, slots=True)
class Assistance:
    """Settings of assisted generation, in the library's own words."""

    num_assistant_tokens: int
    num_assistant_tokens_schedule: str
    assistant_confidence_threshold: float


def grid() -> list[Assistance]:
    """All settings that are tried."""
    constant = [Assistance(n, "constant", c) for n, c in itertools.product(LENGTHS, CONFIDENCES)]
    return constant + [
        Assistance(n, schedule, c)
        for n, schedule, c in itertools.product(SCHEDULED_LENGTHS, SCHEDULES, CONFIDENCES[:2])
    ]


class Assisted:
    """A target and its draft; texts have a fixed length."""

    def __init__(self, target: Path, dtype: str, draft: Path, draft_dtype: str) -> None:
        self._target, self._draft = load(target, dtype), load(draft, draft_dtype)
        self._tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        for model in (self._target, self._draft):
            model.generation_config.eos_token_id = None

    def generate(
        self, prompt: str, temperature: float, max_tokens: int, threads: int, assistance: Assistance | None
    ) -> float:
        """Tokens per second after the first ones; plain generation without assistance."""
        more: dict[str, Any] = {}
        if temperature:
            more = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if assistance is not None:
            self._draft.generation_config.update(**asdict(assistance))
            more["assistant_model"] = self._draft
        ids = self._tokenizer.encode(prompt).ids
        return generate(self._target, ids, max_tokens, threads=threads, **more).values["tokens_per_s"]

    def tuned(self, prompts: Sequence[str], temperature: float, max_tokens: int, threads: int) -> Assistance:
        """The fastest settings of the grid by the median over prompts; the best few are measured again to decide."""

        def rate(assistance: Assistance, repeats: int) -> float:
            asked = (prompt for _ in range(repeats) for prompt in prompts)
            rates = [self.generate(prompt, temperature, max_tokens, threads, assistance) for prompt in asked]
            return statistics.median(rates)

        finalists = sorted(grid(), key=lambda assistance: rate(assistance, 1))[-FINALISTS:]
        return max(finalists, key=lambda assistance: rate(assistance, FINAL_REPEATS))
