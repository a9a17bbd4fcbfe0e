"""The bare greedy loop of `transformers`: the baseline of a draft's step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache


class BareLoop:
    """One model as the library loads it, with its default attention and cache; batches of equally long texts."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._caches: dict[tuple[int, int], DynamicCache] = {}  # by texts and their length, filled once

    @torch.inference_mode()
    def step_ms(self, texts: Sequence[Sequence[int]], step_count: int) -> float:
        """Mean milliseconds of a step of one token of every text, over `step_count` steps after the whole texts."""
        last = torch.tensor([text[-1:] for text in texts])  # [texts, 1] int64
        cache = self._filled(texts)
        token = self._next(last, cache)  # not timed: allocations of a cache that has just been cut
        began_s = time.perf_counter()
        for _ in range(step_count):
            token = self._next(token, cache)
        took_s = time.perf_counter() - began_s
        cache.crop(-1 - step_count)
        return took_s / step_count * 1e3

    def _next(self, token: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        logits: torch.Tensor = self._model(token, past_key_values=cache, use_cache=True).logits  # [texts, 1, vocab]
        return logits[:, -1:].argmax(-1)

    def _filled(self, texts: Sequence[Sequence[int]]) -> DynamicCache:
        """A cache of all tokens but the last of each text."""
        key = (len(texts), len(texts[0]))
        if key not in self._caches:
            self._caches[key] = DynamicCache()
            prompt = torch.tensor([text[:-1] for text in texts])
            self._model(prompt, past_key_values=self._caches[key], use_cache=True)
        return self._caches[key]
