"""The noise: equal in plain Python and in torch, uniform, and independent between neighbouring keys."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from specdec.decoding import noise as vectorised
from specdec.protocol import noise
from specdec.protocol.noise import Lane
from tests.exactness.statistics import P_VALUE_LIMIT, chi_square_p, uniformity_p
from tests.support import plain_noise

CPU = torch.device("cpu")


def bits_of(seeds: list[int], positions: list[int], token_ids: range | list[int]) -> torch.Tensor:
    """Gumbel integers of some rows.  # [rows, len(token_ids)] int64"""
    return vectorised.gumbel_bits(vectorised.gumbel_keys(seeds, positions, CPU), torch.tensor([list(token_ids)]))


def test_the_last_word_runs_through_splitmix64() -> None:
    """Claim: absorbing 0, 1, 2, … into one state gives SplitMix64's outputs. Source: the generator's published outputs
    for seed 1234567. Conclusive: any slip in a constant or a shift changes them all.
    """
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [noise.absorb(1234567, word) for word in range(5)] == published


def test_torch_and_plain_python_agree_bit_for_bit() -> None:
    """Claim: both give the same integer for any key. Conclusive: random keys of full width, adjacent ones, and both
    ends of every range, where signed and unsigned arithmetic would part.
    """
    random_source = random.Random(7)
    ends = [0, 1, 2, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1]
    seeds = ends + [random_source.getrandbits(64) for _ in range(40)]
    positions = [0, 1, 2, (1 << 24) - 1, (1 << 24)]
    token_ids = [*range(20), *(random_source.randrange(1 << 24) for _ in range(20)), (1 << 24) - 1]
    for position in positions:
        found = bits_of(seeds, [position] * len(seeds), token_ids).tolist()
        assert found == [[plain_noise.gumbel_bits(seed, position, token) for token in token_ids] for seed in seeds]


def test_both_ways_to_the_bits_agree_with_the_plain_ones() -> None:
    """Claim: numpy, used on a CPU, and torch, used on any other device, give the integers of the definition. Source:
    `tests.support.plain_noise`. Conclusive: equality, for seeds and ids with every bit set and none."""
    seeds, token_ids = [0, 1, (1 << 63) + 5, (1 << 64) - 1], [0, 1, 4095, 1 << 24]
    keys, ids = vectorised.gumbel_keys(seeds, [0, 7, 9, 1 << 20], CPU), torch.tensor([token_ids])
    wanted = [
        [plain_noise.gumbel_bits(seed, position, token) for token in token_ids]
        for seed, position in zip(seeds, [0, 7, 9, 1 << 20])
    ]
    assert vectorised.numpy_gumbel_bits(keys, ids).tolist() == wanted
    assert vectorised.torch_gumbel_bits(keys, ids).tolist() == wanted


def test_gumbel_is_finite_at_both_ends_and_equal_to_the_plain_one() -> None:
    """Claim: G stays finite for the smallest and largest integer, and torch's is the plain one up to the last digits of
    the logarithm. With 53 bits h + 1/2 would round to 2**53 for the largest, and G be infinite.
    """
    top = (1 << noise.GUMBEL_BITS) - 1
    ends = [-math.log(-math.log((h + 0.5) * 2.0**-noise.GUMBEL_BITS)) for h in (0, top)]
    assert -3.61 < ends[0] < -3.60 and 36.73 < ends[1] < 36.75
    assert top + 0.5 != top + 1.0 and (top + 0.5) * 2.0**-noise.GUMBEL_BITS < 1
    keys = vectorised.gumbel_keys([5], [9], CPU)
    found = vectorised.gumbel(keys, torch.arange(2000).unsqueeze(0))[0].tolist()
    wanted = [plain_noise.gumbel(5, 9, token) for token in range(2000)]
    assert all(math.isclose(f, w, rel_tol=1e-13, abs_tol=1e-13) for f, w in zip(found, wanted))


def test_gumbel_bits_do_not_depend_on_the_layout() -> None:
    """Claim: a token's noise is the same number whichever tokens and rows are computed beside it, and with any number
    of threads. Conclusive: torch.equal over offsets and widths that put it in every lane of a vector instruction.
    """
    keys = vectorised.gumbel_keys([3, 4, 5], [7, 7, 8], CPU)
    ids = torch.arange(70_000).unsqueeze(0)
    whole = vectorised.gumbel(keys, ids)
    for start, stop in [(0, 1), (1, 9), (3, 36), (5, 4100), (69_990, 70_000)]:
        assert torch.equal(vectorised.gumbel(keys, ids[:, start:stop]), whole[:, start:stop])
        assert torch.equal(vectorised.gumbel(keys[1:2], ids[:, start:stop]), whole[1:2, start:stop])
    torch.set_num_threads(2)
    assert torch.equal(vectorised.gumbel(keys, ids), whole)


AXES = {
    "token ids": (range(1), range(1), range(1 << 16)),
    "positions": (range(1), range(1 << 10), range(64)),
    "seeds": (range(1 << 10), range(1), range(64)),
    "seeds and positions": (range(256), range(256), range(1)),
}


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES.keys())
def test_neighbouring_keys_are_uniform_and_independent(axes) -> None:
    """Claim: over adjacent keys the top and bottom bits are uniform, and so are pairs of neighbours along each axis.
    Conclusive: chi-square over 256 cells with fixed keys and a fixed limit; a counter used raw fails at once.
    """
    seeds, positions, token_ids = axes
    grid = bits_of(*map(list, zip(*itertools.product(seeds, positions))), token_ids)
    grid = grid.reshape(len(seeds), len(positions), len(token_ids))
    for part in (grid >> (noise.GUMBEL_BITS - 8), grid & 0xFF, (grid >> 20) & 0xFF):
        assert uniformity_p(part, 256) > P_VALUE_LIMIT
        nibbles = part >> 4
        for axis in range(3):
            if part.shape[axis] > 1:
                last = part.shape[axis] - 1
                one, other = nibbles.narrow(axis, 0, last), nibbles.narrow(axis, 1, last)
                assert uniformity_p(one * 16 + other, 256) > P_VALUE_LIMIT


def test_every_bit_is_fair_and_flips_with_every_bit_of_the_key() -> None:
    """Claim: full avalanche: changing one bit of one word of the key flips each output bit in half of the cases.
    Conclusive: every third bit of the key against every third of the output, 400 keys each; the largest deviation of
    about 950 shares stays within what chance allows. A word that is only added in leaves some bits that never flip.
    """
    random_source = random.Random(3)
    keys = [tuple(random_source.getrandbits(width) for width in (64, 32, 32)) for _ in range(400)]
    worst = 0.0
    for word, width in enumerate((64, 32, 32)):
        for bit in range(0, width, 3):
            flips = [0] * 64
            for key in keys:
                changed = tuple(value ^ (1 << bit) if index == word else value for index, value in enumerate(key))
                seed, a, b = changed
                difference = noise.hash64(seed, Lane.NEXT, a, b) ^ noise.hash64(key[0], Lane.NEXT, *key[1:])
                for out in range(0, 64, 3):
                    flips[out] += difference >> out & 1
            worst = max(worst, max(abs(count / len(keys) - 0.5) for count in flips[::3]))
    assert worst < 0.5 * 5.7 / math.sqrt(len(keys))  # 5.7 standard deviations: 1e-8 for each share


def test_lanes_and_order_of_words_are_independent() -> None:
    """Claim: draws that differ in the lane, or have round and position exchanged, are unrelated.
    Conclusive: uniform pairs over 256 cells; a hash that ignored lane or order would put all pairs on the diagonal.
    """

    def nibble(lane: Lane, a: int, b: int) -> int:
        return noise.uniform_bits(12, lane, a, b) >> (noise.UNIFORM_BITS - 4)

    for one, other in itertools.combinations(Lane, 2):
        pairs = [nibble(one, a, b) * 16 + nibble(other, a, b) for a in range(40) for b in range(100)]
        assert uniformity_p(torch.tensor(pairs), 256) > P_VALUE_LIMIT
    exchanged = [nibble(Lane.NEXT, a, b) * 16 + nibble(Lane.NEXT, b, a) for a in range(100) for b in range(a)]
    assert uniformity_p(torch.tensor(exchanged), 256) > P_VALUE_LIMIT


def test_uniform_and_gumbel_have_their_distributions() -> None:
    """Claim: `uniform` is uniform on [0, 1), G is standard Gumbel. Conclusive: chi-square over 64 quantile cells."""
    draws = [noise.uniform(1, Lane.ACCEPT, 0, position) for position in range(20_000)]
    assert all(0 <= draw < 1 for draw in draws)
    assert uniformity_p(torch.tensor([int(draw * 64) for draw in draws]), 64) > P_VALUE_LIMIT
    values = vectorised.gumbel(vectorised.gumbel_keys([8], [1], CPU), torch.arange(100_000).unsqueeze(0))
    quantiles = (-(-values).exp()).exp()  # the distribution function exp(-exp(-G)) maps G to a uniform number
    counts = torch.bincount((quantiles * 64).long().flatten(), minlength=64)
    assert chi_square_p(counts, [1 / 64] * 64) > P_VALUE_LIMIT
