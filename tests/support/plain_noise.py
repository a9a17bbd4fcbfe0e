"""Gumbel noise in plain Python, token by token: the reference of the vectorised one."""

from __future__ import annotations

import math

from specdec.protocol.noise import GUMBEL_BITS, Lane, hash64


def gumbel_bits(seed: int, position: int, token_id: int) -> int:
    """The integer in [0, 2**52) behind the Gumbel noise of one token at one position."""
    return hash64(seed, Lane.GUMBEL, position, token_id) >> (64 - GUMBEL_BITS)


def gumbel(seed: int, position: int, token_id: int) -> float:
    """G = -log(-log((h + 1/2) * 2**-52)): finite, from -3.61 to 36.74."""
    return -math.log(-math.log((gumbel_bits(seed, position, token_id) + 0.5) * 2.0**-GUMBEL_BITS))
