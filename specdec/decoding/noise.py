"""The noise of `specdec.protocol.noise`, vectorised: the same integers, bit for bit, on every torch device.

Torch has no unsigned 64-bit arithmetic, so states are int64 of equal bits: sums and products wrap alike, and a logical
right shift is an arithmetic one with the copied sign bits masked off. On a CPU numpy, which has it, is twice as fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy
import torch
from torch import Tensor

from specdec.decoding.host_copy import sent
from specdec.protocol.noise import GUMBEL_BITS, INCREMENT, MULTIPLIER_1, MULTIPLIER_2, Lane, stream_key

NOISE_KEPT = 512  # positions with kept noise: of 16 sessions with full windows, 8 MB at 4,096 tokens
NOISE: dict[tuple[int, int, int], Tensor] = {}  # kept noise by seed, position and width, oldest first


def signed(word: int) -> int:
    """Returns the int64 with the bits of an unsigned 64-bit integer."""
    return word - (1 << 64) if word >= 1 << 63 else word


def xor_shifted(state: Tensor, count: int) -> Tensor:
    """Returns state ^ (state >>> count), in place on int64."""
    return state.bitwise_xor_((state >> count).bitwise_and_((1 << (64 - count)) - 1))


def gumbel_keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> Tensor:
    """Returns one stream key per row, shared by the noise of all token ids at (seed, position).  # [rows, 1] int64"""
    keys = [signed(stream_key(seed, Lane.GUMBEL, position)) for seed, position in zip(seeds, positions, strict=True)]
    return sent(keys, device, torch.int64).unsqueeze(1)


def gumbel_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Returns 52 bits of hash64 for keys [rows, 1] and token ids [rows or 1, columns].  # [rows, columns] int64"""
    return (numpy_gumbel_bits if keys.device.type == "cpu" else torch_gumbel_bits)(keys, token_ids)


def torch_gumbel_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """`gumbel_bits` on any device."""
    state = (token_ids + 1) * signed(INCREMENT) + keys
    xor_shifted(state, 30).mul_(signed(MULTIPLIER_1))
    xor_shifted(state, 27).mul_(signed(MULTIPLIER_2))
    xor_shifted(state, 31)
    return state.bitwise_right_shift_(64 - GUMBEL_BITS).bitwise_and_((1 << GUMBEL_BITS) - 1)


def numpy_gumbel_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """`gumbel_bits` on a CPU."""
    state = (token_ids.numpy().view(numpy.uint64) + numpy.uint64(1)) * numpy.uint64(INCREMENT)
    state = state + keys.numpy().view(numpy.uint64)
    state ^= state >> numpy.uint64(30)
    state *= numpy.uint64(MULTIPLIER_1)
    state ^= state >> numpy.uint64(27)
    state *= numpy.uint64(MULTIPLIER_2)
    state ^= state >> numpy.uint64(31)
    state >>= numpy.uint64(64 - GUMBEL_BITS)
    return torch.from_numpy(state.view(numpy.int64))


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Returns standard Gumbel noise G = -log(-log((h + 1/2) * 2**-52)), finite.  # [rows, columns] float64

    It depends on seed, position and token id only, not on context or logits.
    """
    fraction = gumbel_bits(keys, token_ids).to(torch.float64).add_(0.5).mul_(2.0**-GUMBEL_BITS)
    return fraction.log_().neg_().log_().neg_()


def near_gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Returns -log(-log u) for uniform u, -log u as -log1p(u - 1): the winning u, near 1, stay precise.

    It is `gumbel` in float32.  # [n, columns]
    """
    rest = (1 << GUMBEL_BITS) - gumbel_bits(keys, token_ids)  # (1 - u) * 2**52, half a unit more
    return rest.to(torch.float32).sub_(0.5).mul_(-(2.0**-GUMBEL_BITS)).log1p_().neg_().log_().neg_()


def kept_noise(keys: Sequence[tuple[int, int]], width: int) -> Tensor:
    """Returns the `near_gumbel` of all tokens at each (seed, position), which all nodes there and every tree share.

    That of new positions is computed together: at 8 of them in a third of the time.  # [len(keys), width]
    """
    missing = [key for key in dict.fromkeys(keys) if (*key, width) not in NOISE]
    if missing:
        seeds, positions = zip(*missing)
        made = near_gumbel(gumbel_keys(seeds, positions, torch.device("cpu")), token_ids_below(width))
        NOISE.update(((*key, width), row) for key, row in zip(missing, made))
    rows = [NOISE[*key, width] for key in keys]
    if len(NOISE) > NOISE_KEPT:
        for oldest in list(NOISE)[:-NOISE_KEPT]:
            NOISE.pop(oldest, None)
    return torch.stack(rows)


@lru_cache(8)
def token_ids_below(width: int) -> Tensor:
    """Returns the ids of a vocabulary.  # [1, width] int64"""
    return torch.arange(width)[None]
