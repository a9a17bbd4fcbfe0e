"""All randomness of specdec: a counter-based 64-bit integer hash in plain Python.

A draw is a pure function of its key (seed, lane, a, b): repeated after a crash, on another machine or in another order
it is the same. `specdec.decoding.noise` computes the same integers in torch, bit for bit.

The hash is the SplitMix64 generator (Steele, Lea, Flood 2014) used as a tree: every word of the key advances the state
by a multiple of an odd constant and passes it through the finaliser `mix64`, a bijection of 64 bits whose every output
bit depends on every input bit. The last word runs through one SplitMix64 stream, whose outputs pass BigCrush.
"""

from __future__ import annotations

import enum

MASK64 = (1 << 64) - 1
INCREMENT = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: multiples of it visit all 64-bit values
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
UNIFORM_BITS = 53  # a float64 in [0, 1) holds a multiple of 2**-53 exactly
GUMBEL_BITS = 52  # one fewer: h + 1/2 needs a bit of its own to be exact, and must never round up to 1


class Lane(enum.IntEnum):
    """The purpose of a draw. Draws of different lanes are independent, whatever the rest of their keys."""

    DRAFT = 1  # seed: the draft's own secret of a session's incarnation; a: epoch; b: node
    ACCEPT = 2  # a: round_index; b: position, and the rank among siblings above 32 bits
    NEXT = 3  # a: round_index; b: position
    GUMBEL = 4  # a: position; b: token id


def mix64(state: int) -> int:
    """The finaliser of SplitMix64: a bijection of [0, 2**64) with full avalanche."""
    state = ((state ^ (state >> 30)) * MULTIPLIER_1) & MASK64
    state = ((state ^ (state >> 27)) * MULTIPLIER_2) & MASK64
    return state ^ (state >> 31)


def absorb(state: int, word: int) -> int:
    """The state after one more word of the key; `word` is any integer from 0 to 2**64 - 1."""
    return mix64((state + (word + 1) * INCREMENT) & MASK64)


def stream_key(seed: int, lane: Lane, a: int) -> int:
    """Returns the common state of all draws of (seed, lane, a): hash64(seed, lane, a, b) is absorb(stream_key, b)."""
    return absorb(absorb(absorb(0, seed), lane), a)


def hash64(seed: int, lane: Lane, a: int, b: int) -> int:
    """Returns 64 pseudorandom bits, the same for the same key everywhere."""
    return absorb(stream_key(seed, lane, a), b)


def uniform_bits(seed: int, lane: Lane, a: int, b: int) -> int:
    """An integer in [0, 2**53), for draws by integer arithmetic."""
    return hash64(seed, lane, a, b) >> (64 - UNIFORM_BITS)


def uniform(seed: int, lane: Lane, a: int, b: int) -> float:
    """A float64 in [0, 1), a multiple of 2**-53."""
    return uniform_bits(seed, lane, a, b) * 2.0**-UNIFORM_BITS
