"""`transformers` itself on a tiny model's folder: the reference of the engine."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.engine_models import OUTPUT_PADDING, Driver, model_class


class Reference:
    """A model folder in `transformers`' own hands, with its own attention in plain matrix products."""

    def __init__(self, folder: Path, architecture: str, vocabulary_size: int = 288, dtype: torch.dtype = torch.float32):
        kind = model_class(architecture)
        self._model = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        self._hidden_ids = list(range(vocabulary_size, vocabulary_size + OUTPUT_PADDING))  # columns without a token
        self._vocabulary_size = vocabulary_size

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits at every position: [rows, vocab] float32."""
        return self._model(torch.tensor([token_ids])).logits[0, :, : self._vocabulary_size].float()

    @torch.inference_mode()
    def generate(self, prompt: list[int], count: int) -> list[int]:
        """`count` greedy tokens."""
        output = self._model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=self._hidden_ids,
        )
        return output[0, len(prompt) :].tolist()


def largest_difference(driver: Driver, reference: Reference, token_ids: list[int]) -> float:
    """The largest difference to the logits of `transformers`, over all positions of a text fed at once."""
    table = driver.open(len(token_ids))
    ours = driver.feed(table, token_ids)
    driver.cache.release(table)
    return (ours - reference.logits(token_ids)).abs().max().item()
