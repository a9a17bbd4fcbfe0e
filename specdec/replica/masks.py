"""The masks of a step: those of its sessions under a grammar, as the sampler takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specdec.engine.loading.model_folder import open_model_folder
from specdec.engine.readback import Readback
from specdec.engine.scheduling.feed import Answer, Payload
from specdec.engine.scheduling.runner import Sampler
from specdec.engine.scheduling.scheduler import Engine
from specdec.errors import GrammarFailed, ReplicaUnavailable
from specdec.grammar.jobs import Masks

ALL = -1  # a word of legal tokens


# (payloads, row counts, logits, readback, masks); masks: [rows, words] int32, None where all tokens are legal
MaskedSampler = Callable[
    [Sequence[Payload], Sequence[int], torch.Tensor, Readback | None, torch.Tensor | None],
    Sequence[Answer],
]


def with_masks(sampler: MaskedSampler[Payload, Answer]) -> Sampler[Payload, Answer]:
    """Returns a sampler of payloads of which some have `masks`. It waits for these. Where they cannot be made all
    tokens count as legal, and who takes the answer drops it: after an error all others would be sampled again."""

    def sample(
        payloads: Sequence[Payload], row_counts: Sequence[int], logits: torch.Tensor, readback: Readback | None = None
    ) -> Sequence[Answer]:
        every = [getattr(payload, "masks", None) for payload in payloads]
        masks = together(every, row_counts, logits.shape[1]) if any(every) else None
        return sampler(payloads, row_counts, logits, readback, masks)

    return sample


def together(every: Sequence[Masks | None], row_counts: Sequence[int], vocabulary_size: int) -> torch.Tensor:
    """Returns the masks of all rows of a step.  # [sum(row_counts), words] int32"""
    rows = torch.full((sum(row_counts), -(-vocabulary_size // 32)), ALL, dtype=torch.int32)
    for own, part in zip(every, rows.split(list(row_counts))):
        if own is not None:
            with suppress(GrammarFailed):
                found = torch.frombuffer(own.result().bits, dtype=torch.int32).view(len(part), -1)
                part[:, : found.shape[1]] = found[:, : part.shape[1]]
    return rows


def posting(engine: Engine[Any, Any], function: Callable[[], None]) -> Callable[[], None]:
    """Returns what runs a function on the engine thread, called from any other; nothing once the engine has stopped."""

    def post() -> None:
        with suppress(ReplicaUnavailable):
            engine.post(function, is_urgent=True)

    return post


def tokenizer_of(model: str) -> Callable[[], Path]:
    """Returns what tells the tokenizer file of a model, folder or hub id."""
    return partial(_tokenizer_of, model)


def _tokenizer_of(model: str) -> Path:
    return open_model_folder(model).path / "tokenizer.json"
