"""Texts with the target's distribution at every position: everything that a student learns from, in files.

A distribution is stored as the log-probabilities of its likeliest tokens at temperature 1; the rest is one number, what
they leave of 1. So a text costs the target one pass, when it is written, and may be learned from many times.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.errors import ConfigError

LIKELIEST_COUNT = 32  # of a chat model at temperature 1 they have some 0.97 of the probability


def no_tokens() -> Tensor:
    """[0] int32"""
    return torch.zeros(0, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """Texts one after another. Position i of the labels predicts the token after token i.

    `lengths`: tokens of each text. `learned_from`: of each text, the first position that is learned; before it lies
    what every text begins with. `answered_from`: the position whose label predicts the first token of the last passage,
    which the target wrote at the text's temperature. Of an encoder-decoder target a text is what the decoder reads, and
    its encoder's input is among `input_ids`; both of these are empty of a decoder alone.
    """

    token_ids: Tensor  # [tokens] int32
    likeliest_ids: Tensor  # [tokens, LIKELIEST_COUNT] int32, likeliest first
    log_probs: Tensor  # [tokens, LIKELIEST_COUNT] float16, natural
    lengths: Tensor  # [texts] int32
    learned_from: Tensor  # [texts] int32
    answered_from: Tensor  # [texts] int32
    temperatures: Tensor  # [texts] float32
    input_ids: Tensor = field(default_factory=no_tokens)  # [input tokens] int32
    input_lengths: Tensor = field(default_factory=no_tokens)  # [texts] int32, or [0]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def length_max(self) -> int:
        """The most tokens of a text, with its input."""
        own = self.lengths + self.input_lengths if len(self.input_lengths) else self.lengths
        return int(own.max())

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The encoder's input of each text; none of a decoder alone."""
        return self.input_ids.split(self.input_lengths.tolist()) if len(self.input_lengths) else ()

    def save(self, file: Path, origin: str) -> None:
        """Writes one file, whole or not at all; `origin`: a digest of everything that decides its texts."""
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        tensors = {own.name: getattr(self, own.name).contiguous() for own in fields(self)}
        save_file(tensors, unfinished, metadata={"origin": origin})
        os.replace(unfinished, file)

    @classmethod
    def load(cls, file: Path, origin: str) -> LabelledTexts:
        """Reads one file. Raises ConfigError for any other file, and for texts of another origin."""
        try:
            with safe_open(file, "pt") as opened:
                own = (opened.metadata() or {}).get("origin")
                texts = cls(**{name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118  # no mapping
        except (OSError, TypeError, SafetensorError) as error:
            raise ConfigError(f"{file} has no labelled texts: {error}") from None
        if own != origin:
            raise ConfigError(f"{file} has texts of another target, prompts or settings: give another --texts folder")
        return texts

    @classmethod
    def joined(cls, parts: Sequence[LabelledTexts]) -> LabelledTexts:
        """Returns the texts of all parts, in order."""
        return cls(**{own.name: torch.cat([getattr(part, own.name) for part in parts]) for own in fields(cls)})


def label(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the likeliest ids and their log-probabilities of rows of logits.  # [n, k] int32, [n, k] float16

    logits: [n, vocabulary] float32
    """
    values, ids = logits.topk(min(LIKELIEST_COUNT, logits.shape[1]), dim=1)
    return ids.to(torch.int32), (values - logits.logsumexp(dim=1, keepdim=True)).to(torch.float16)
