"""Prompt lookup of `transformers` on a loaded model: it drafts what followed the last tokens' first earlier occurrence.

Greedy and with one thread, as our target computes. A text ends at the model's own end of text. The number of tokens
looked up at a time is the best of a few, found on prompts that are not measured; the rest are the library's defaults.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.assisted import PAD_TOKEN_ID, Clock

NUM_TOKENS = (3, 5, 10, 20, 32)
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
    def tokens_per_s(self) -> float:
        """After the first pass; 0 for a text of one pass."""
        return (len(self.token_ids) - self.first_tokens) / (self.seconds - self.first_seconds)

    @property
    def tokens_per_pass(self) -> float:
        """After the first pass, which reads the prompt."""
        return (len(self.token_ids) - self.first_tokens) / max(1, self.passes - 1)


def load(folder: Path, dtype: str) -> Model:
    """A model as `transformers` loads it, eager, with its default attention and cache."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


@torch.inference_mode()
def generate(model: Model, prompt_ids: Sequence[int], max_tokens: int, num_tokens: int | None) -> Generation:
    """The greedy continuation, at most `max_tokens` long, with `num_tokens` looked up at a time; None: plain."""
    torch.set_num_threads(1)
    ids = torch.tensor([list(prompt_ids)])  # [1, prompt] int64
    clock = Clock()
    began_s = time.perf_counter()
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=PAD_TOKEN_ID,
        prompt_lookup_num_tokens=num_tokens,
        streamer=clock,
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
