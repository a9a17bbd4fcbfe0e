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
from specdec.engine.cpu.sampling import kernels_for, mask

WORD_BITS = 32
# By octet, whose lowest bit is the first token: a CPU looks up eight tokens at once.
HIGHEST = numpy.where(numpy.arange(256)[:, None] >> numpy.arange(8) & 1, math.inf, -math.inf).astype(numpy.float32)


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
    if not is_device(logits.device):
        native = kernels_for(logits)
        found, is_empty = mask(native, logits, masks) if native else _masked_on_host(logits, masks)
        empty = is_empty.nonzero().flatten().tolist()
        if empty:
            found[empty] = logits[empty].to(found.dtype)
        return found, is_empty
    legal = highest(masks, logits.shape[1], logits.device)
    torch.minimum(logits, legal, out=legal)
    is_empty = legal.amax(dim=1, keepdim=True) == -math.inf
    return torch.where(is_empty, logits, legal), is_empty.squeeze(1)


def _masked_on_host(logits: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """See `engine.cpu.sampling.mask`. A minimum costs a third of a masked fill, whose branches follow the bits."""
    width = logits.shape[1]
    octets = masks[:, : word_count(width)].contiguous().numpy().view(numpy.uint8)
    legal = HIGHEST.take(octets, axis=0).reshape(len(masks), -1)[:, :width]
    numpy.minimum(logits.numpy(), legal, out=legal)
    return torch.from_numpy(legal), torch.from_numpy(legal.max(axis=1) == -math.inf)


def highest(masks: Tensor, width: int, device: torch.device) -> Tensor:
    """Returns the highest logit that a token below `width` may have: infinity if it is legal, else -infinity.
    # [rows, width] float32 on the device"""
    words = sent(masks[:, : word_count(width)].contiguous(), device)
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=device)
    bits = ((words.unsqueeze(2) >> shifts) & 1).flatten(1)[:, :width]
    return torch.full(bits.shape, -math.inf, device=device).masked_fill_(bits == 1, math.inf)
