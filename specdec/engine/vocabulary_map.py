"""A draft with fewer tokens than its target: which of the target's ids its own are.

Token i of the draft is token `target_token_ids[i]` of the target. Its last token stands for all others: the draft reads
it and never proposes it. Ids outside this module are the target's, so protocol and rules know nothing of the map; the
draft distribution is that of its own tokens, and the others have none.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from specdec.engine.model_folder import read_json
from specdec.errors import ModelRefused

VOCABULARY_FILE = "draft_vocabulary.json"


class VocabularyMap:
    """The map of a draft. `size`: the target's ids; `own_size`: the draft's tokens but the last."""

    def __init__(self, target_token_ids: Tensor, size: int) -> None:
        self.size, self.own_size = size, len(target_token_ids)
        self._target_token_ids = target_token_ids
        self.own_ids = torch.full((size,), self.own_size)
        self.own_ids[target_token_ids] = torch.arange(self.own_size)

    @classmethod
    def read(cls, folder: Path, size: int, output_width: int) -> VocabularyMap | None:
        """Returns the map in a model folder, if it has one. Raises ModelRefused for a wrong one.

        `size`: the ids of the folder's tokenizer, which is the target's; `output_width`: of the draft's output layer.
        """
        file = folder / VOCABULARY_FILE
        if not file.is_file():
            return None
        ids = read_json(file).get("target_token_ids")
        if not isinstance(ids, list) or not all(isinstance(one, int) and 0 <= one < size for one in ids):
            raise ModelRefused(f"{file}: target_token_ids must be a list of ids from 0 to {size - 1}")
        if len(set(ids)) != len(ids) or len(ids) != output_width - 1:
            raise ModelRefused(f"{file}: it must name {output_width - 1} different ids, one fewer than the model has")
        return cls(torch.tensor(ids), size)

    def to(self, device: torch.device) -> VocabularyMap:
        """Moves the map to a device; returns it."""
        self._target_token_ids, self.own_ids = self._target_token_ids.to(device), self.own_ids.to(device)
        return self

    def own(self, token_ids: Tensor) -> Tensor:
        """Returns the draft's ids of the target's."""
        return self.own_ids[token_ids]

    def spread(self, logits: Tensor) -> Tensor:
        """Returns logits by the target's ids; minus infinity for those the draft does not have.

        logits: [n, own_size] float32  # [n, size] float32
        """
        spread = logits.new_full((len(logits), self.size), -math.inf)
        return spread.index_copy_(1, self._target_token_ids, logits)
