"""`transformers` generate and assisted generation in this process, at assisted generation's own best settings."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from transformers.generation.streamers import BaseStreamer

PAD_TOKEN_ID = 0
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


@dataclass(slots=True)
class Clock(BaseStreamer):
    """When tokens came, and how many at a time; the first call brings the prompt."""

    moments: list[tuple[float, int]] = field(default_factory=list)

    def put(self, value: torch.Tensor) -> None:
        self.moments.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        pass

    @property
    def tokens_per_s(self) -> float:
        """After the first tokens of the output."""
        (began_s, _), *rest = self.moments[1:]
        return sum(count for _, count in rest) / (rest[-1][0] - began_s)


class Assisted:
    """Target and draft as `transformers` loads them, eager, with its default attention and cache."""

    def __init__(self, target: Path, dtype: str, draft: Path, draft_dtype: str) -> None:
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._target = load(target, dtype=getattr(torch, dtype)).eval()
        self._draft = load(draft, dtype=getattr(torch, draft_dtype)).eval()
        self._tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        for model in (self._target, self._draft):
            model.generation_config.eos_token_id = None  # texts have a fixed length

    @torch.inference_mode()
    def generate(
        self, prompt: str, temperature: float, max_tokens: int, threads: int, assistance: Assistance | None
    ) -> float:
        """Tokens per second after the first ones; plain generation without assistance."""
        torch.set_num_threads(threads)
        ids = torch.tensor([self._tokenizer.encode(prompt).ids])
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        clock = Clock()
        extra = {}
        if assistance is not None:
            own = self._draft.generation_config
            own.num_assistant_tokens = assistance.num_assistant_tokens
            own.num_assistant_tokens_schedule = assistance.num_assistant_tokens_schedule
            own.assistant_confidence_threshold = assistance.assistant_confidence_threshold
            extra = {"assistant_model": self._draft}
        self._target.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            pad_token_id=PAD_TOKEN_ID,
            streamer=clock,
            **({"do_sample": False} | sampling),
            **extra,
        )
        return clock.tokens_per_s

    def tuned(self, prompts: Sequence[str], temperature: float, max_tokens: int, threads: int) -> Assistance:
        """The fastest settings of the grid by the median over prompts; the best few are measured again to decide."""

        def rate(assistance: Assistance, repeats: int) -> float:
            asked = (prompt for _ in range(repeats) for prompt in prompts)
            rates = [self.generate(prompt, temperature, max_tokens, threads, assistance) for prompt in asked]
            return statistics.median(rates)

        finalists = sorted(grid(), key=lambda assistance: rate(assistance, 1))[-FINALISTS:]
        return max(finalists, key=lambda assistance: rate(assistance, FINAL_REPEATS))
