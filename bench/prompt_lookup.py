"""`transformers` generate in this process, and its prompt lookup, which drafts what followed the last tokens' first
earlier occurrence, at the best number of tokens, found on prompts that are not measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

NUM_TOKENS = (3, 5, 10, 20, 32)
PAD_TOKEN_ID = 0
Model = Any  # a causal model of `transformers`, whose own types do not know that it generates


@dataclass(frozen=True, slots=True)
class Generation:
    """One text. `seconds` are of the whole call, `first_seconds` until the first pass had brought `first_tokens`;
    `passes`: how often the model ran, the first time over the prompt."""

    token_ids: tuple[int, ...]
    seconds: float
    first_tokens: int
    first_seconds: float
    passes: int

    @property
    def values(self) -> dict[str, float]:
        """What came after the first pass, in the words of `bench.texts.generate`."""
        tokens, seconds = len(self.token_ids) - self.first_tokens, self.seconds - self.first_seconds
        return {"tokens_per_s": tokens / seconds, "tokens": tokens, "steps": self.passes - 1, "seconds": seconds}


@dataclass(slots=True)
class Clock(BaseStreamer):
    """When tokens came, and how many at a time; the first call brings the prompt."""

    moments: list[tuple[float, int]] = field(default_factory=list)

    def put(self, value: torch.Tensor) -> None:
        self.moments.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        pass


def load(folder: Path, dtype: str) -> Model:
    """A model as `transformers` loads it, eager, with its default attention and cache."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


@torch.inference_mode()
def generate(
    model: Model,
    prompt_ids: Sequence[int],
    max_tokens: int,
    num_tokens: int | None = None,
    threads: int = 1,
    **more: Any,
) -> Generation:
    """The continuation to the model's own end of text, at most `max_tokens` long, with `num_tokens` looked up at a time
    (None: plain); greedy, or as `more` says in the library's words."""
    torch.set_num_threads(threads)
    ids = torch.tensor([list(prompt_ids)])  # [1, prompt] int64
    clock = Clock()
    own = {"do_sample": False, "prompt_lookup_num_tokens": num_tokens, "pad_token_id": PAD_TOKEN_ID, **more}
    began_s = time.perf_counter()
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, streamer=clock, **own
    )
    seconds = time.perf_counter() - began_s
    _prompt, (first_s, first_tokens), *later = clock.moments
    token_ids = tuple(output[0, ids.shape[1] :].tolist())
    return Generation(token_ids, seconds, first_tokens, first_s - began_s, 1 + len(later))


def best_num_tokens(model: Model, prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
    """The fastest of NUM_TOKENS by the geometric mean over prompts of tokens per second of the whole call, each prompt
    with all numbers in turn; a short text warms up."""
    generate(model, prompts[0], NUM_TOKENS[-1], NUM_TOKENS[-1])
    rates: dict[int, list[float]] = {number: [] for number in NUM_TOKENS}
    for prompt_ids in prompts:
        for number, own in rates.items():
            made = generate(model, prompt_ids, max_tokens, number)
            own.append(len(made.token_ids) / made.seconds)
    return max(NUM_TOKENS, key=lambda number: statistics.geometric_mean(rates[number]))
