"""Masks: the legal tokens of each row of logits, which the caller knows (of a grammar, say). Nothing here does.

A mask is a row of packed bits on the host: bit i of word w is token 32 w + i, 1 is legal.  # [rows, words] int32
It is applied first of all steps: -inf for every other token, so that no later step sees one.
"""

from __future__ import annotations

import math

import numpy
import torch
from torch import Tensor

from specdec.decoding.host_copy import is_device, sent

WORD_BITS = 32


def word_count(vocabulary_size: int) -> int:
    """Returns the number of words of a mask."""
    return -(-vocabulary_size // WORD_BITS)


def check_masks(masks: Tensor | None, logits: Tensor) -> None:
    """Raises ValueError unless there is a mask for each row of logits, of at least as many bits as tokens."""
    rows, width = logits.shape
    if masks is not None and (
        masks.dtype != torch.int32 or masks.dim() != 2 or len(masks) != rows or masks.shape[1] < word_count(width)
    ):
        wanted = f"torch.int32 [{rows}, at least {word_count(width)}]"
        raise ValueError(f"masks are {masks.dtype} {list(masks.shape)}; they must be {wanted}")


def masked(logits: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logits with -inf for every illegal token, in a copy, and which rows have no legal token: these stay
    as they are. On the target such a row lies below an illegal draft token only, where no text arrives.
    # logits: [rows, vocabulary]; masks: [rows, words] int32 of the host -> [rows, vocabulary], [rows] bool
    """
    legal = logits.masked_fill(illegal_tokens(masks, logits.shape[1], logits.device), -math.inf)
    is_empty = legal.amax(dim=1, keepdim=True) == -math.inf
    if is_device(logits.device) or bool(is_empty.any()):
        legal = torch.where(is_empty, logits, legal)
    return legal, is_empty.squeeze(1)


def illegal_tokens(masks: Tensor, width: int, device: torch.device) -> Tensor:
    """Returns the tokens below `width` whose bits are not set.  # [rows, width] bool on the device"""
    words = masks[:, : word_count(width)]
    if not is_device(device):
        octets = (~words).contiguous().numpy().view(numpy.uint8)
        return torch.from_numpy(numpy.unpackbits(octets, axis=1, count=width, bitorder="little")).view(torch.bool)
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=device)
    bits = (sent(~words, device).unsqueeze(2) >> shifts) & 1
    return bits.to(torch.bool).flatten(1)[:, :width]
