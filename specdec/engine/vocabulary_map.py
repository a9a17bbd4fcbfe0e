"""A draft that does not have its target's tokens: which of the target's ids its own are.

Ids outside this module are the target's, so protocol and rules know nothing of the map: the draft distribution is that
of the tokens both have, and the others have none. A draft with fewer tokens than its target names them in a file of its
folder; its last token stands for all others, is read and never proposed. With another tokenizer the tokens of equal
bytes are equal, and ids from `size` on are the draft's own, for text it reads in its own tokens (`retokenizer`).
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from specdec.engine.retokenizer import Retokenizer
from specdec.errors import ModelRefused
from specdec.folders import has_file, read_json
from specdec.tokenizer_file import whole_tokenizer

VOCABULARY_FILE = "draft_vocabulary.json"


class VocabularyMap:
    """The map of a draft. `size`: the target's ids; `own_size`: the tokens it can propose, `columns` [own_size] of its
    output layer, `target_token_ids` [own_size] of the target. `own_ids` [ids read]: the draft's token by id.
    `known_share`: of the target's tokens in texts of its own, if that was measured when the draft was made."""

    def __init__(self, target_token_ids: Tensor, size: int, known_share: float | None = None) -> None:
        """A draft whose token i is token target_token_ids[i] of the target, and that has one more."""
        self.size, self.own_size, self.known_share = size, len(target_token_ids), known_share
        self.retokenizer: Retokenizer | None = None
        self.target_token_ids = target_token_ids
        self.columns = torch.arange(self.own_size)
        self.own_ids = torch.full((size,), self.own_size)
        self.own_ids[target_token_ids] = self.columns

    @classmethod
    def read(cls, folder: Path, size: int, output_width: int) -> VocabularyMap | None:
        """Returns the map in a model folder, if it has one. Raises ModelRefused for a wrong one.

        `size`: the ids of the folder's tokenizer, which is the target's; `output_width`: of the draft's output layer.
        """
        file = folder / VOCABULARY_FILE
        if not has_file(file):
            return None
        told = read_json(file)
        ids, share = told.get("target_token_ids"), told.get("share")
        if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < size for one in ids):
            raise ModelRefused(f"{file}: target_token_ids must be a list of ids from 0 to {size - 1}")
        if len(set(ids)) != len(ids) or len(ids) != output_width - 1:
            raise ModelRefused(f"{file}: it must name {output_width - 1} different ids, one fewer than the model has")
        if share is not None and not (isinstance(share, float) and 0 <= share <= 1):
            raise ModelRefused(f"{file}: share is {share!r}; it must be a number from 0 to 1")
        return cls(torch.tensor(ids), size, share)

    @classmethod
    def by_strings(cls, retokenizer: Retokenizer, output_width: int, fewer: VocabularyMap | None) -> VocabularyMap:
        """Returns the map of a draft with another tokenizer; `fewer`: if it has a part of that one's tokens. Raises
        ModelRefused if it has no token of the target."""
        own_ids = torch.arange(output_width) if fewer is None else fewer.own_ids
        width = output_width if fewer is None else fewer.own_size
        every = sorted(retokenizer.own_of.items())
        pairs = ((target_id, int(own_ids[one])) for target_id, one in every if one < len(own_ids))
        known = [(target_id, one) for target_id, one in pairs if one < width]
        if not known:
            raise ModelRefused("draft and target have no token in common")
        made = cls(torch.tensor([target_id for target_id, _ in known]), retokenizer.size)
        made.retokenizer = retokenizer
        made.columns = torch.tensor([one for _, one in known])
        read = torch.zeros(retokenizer.size, dtype=torch.int64)  # the others are read as text
        read[made.target_token_ids] = made.columns
        made.own_ids = torch.cat([read, own_ids])
        return made

    def to(self, device: torch.device) -> VocabularyMap:
        """Moves the map to a device; returns it."""
        self.target_token_ids, self.own_ids = self.target_token_ids.to(device), self.own_ids.to(device)
        return self

    def share(self, tokenizer: Path, text: str) -> float:
        """Returns the share of the target's tokens that the draft can propose: of those in texts of the target if that
        is known, else of those of a text, by the target's tokenizer file."""
        if self.known_share is not None:
            return self.known_share
        ids = whole_tokenizer(tokenizer).encode(text, add_special_tokens=False).ids
        known = set(self.target_token_ids.tolist())
        return sum(token_id in known for token_id in ids) / max(1, len(ids))

    def own(self, token_ids: Tensor) -> Tensor:
        """Returns the draft's ids of those of the target, and of its own."""
        return self.own_ids[token_ids]

    def spread(self, logits: Tensor) -> Tensor:
        """Returns logits by the target's ids; minus infinity for those the draft does not have.

        logits: [n, own_size] float32  # [n, size] float32
        """
        spread = logits.new_full((len(logits), self.size), -math.inf)
        return spread.index_copy_(1, self.target_token_ids, logits)
