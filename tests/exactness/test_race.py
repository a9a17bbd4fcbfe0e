"""Sampling on the native kernels: the target's token is that of torch in every row, or none; guesses are near it."""

from __future__ import annotations

import math

import pytest
import torch

from specdec.decoding import coupled
from specdec.decoding.noise import gumbel, gumbel_keys
from specdec.decoding.verification import VerificationRequest, verify
from specdec.engine.cpu.kernels import Kernels, kernels
from specdec.engine.cpu.sampling import UNDECIDED, guess, race
from specdec.protocol.noise import Lane, stream_key
from specdec.protocol.types import ResolvedSamplingParams, Rule

SEED = 11
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(kernels() is None, reason="no native kernels here")


def noise(positions: range, width: int) -> torch.Tensor:
    """The noise of torch.  # [positions, width] float64"""
    keys = gumbel_keys([SEED] * len(positions), list(positions), CPU)
    return gumbel(keys, torch.arange(width).unsqueeze(0))


def raced(logits: torch.Tensor, positions: range, temperature: float) -> list[int]:
    """The kernel's tokens."""
    native = kernels()
    assert native is not None
    keys = [stream_key(SEED, Lane.GUMBEL, position) for position in positions]
    return race(native, logits, keys, [temperature] * len(positions))


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 255, 256, 257, 4096])
def test_the_kernel_chooses_the_token_of_torch(width: int, temperature: float) -> None:
    """Claim: argmax(score + G) of the kernel is torch's, for flat and steep rows, rounded logits of which many are
    equal, and rows with tokens of probability 0; 12,000 rows in all. Conclusive: the expectation is computed from all
    tokens by the code that decides without kernels, and every row must be decided, so leaving rows to torch fails it.
    """
    torch.manual_seed(width)
    rows = 84
    for number, scale in enumerate((0.0, 1.0, 6.0, 40.0)):
        logits = torch.randn(rows, width) * scale
        if number % 2:
            logits = logits.round()
        logits[:, 1::7] = -math.inf
        positions = range(100 * number + 1, 100 * number + 1 + rows)
        scores = (logits.double() - logits.double().amax(1, keepdim=True)) / temperature
        assert raced(logits, positions, temperature) == (scores + noise(positions, width)).argmax(1).tolist()


def test_rows_at_any_stride_and_thread_have_the_same_tokens() -> None:
    """Claim: neither the rows beside a row, nor their distance in memory, nor the number of threads changes a token.
    Conclusive: 70 rows together, with two threads and in a wider matrix, against each alone."""
    torch.manual_seed(3)
    wide = torch.randn(70, 900)
    logits = wide[:, 50:850]
    alone = [raced(logits[row : row + 1], range(row, row + 1), 1.0)[0] for row in range(70)]
    assert raced(logits, range(70), 1.0) == alone
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert raced(logits.contiguous(), range(70), 1.0) == alone
    finally:
        torch.set_num_threads(before)


def test_scores_too_close_for_a_logarithm_are_left_to_torch() -> None:
    """Claim: where the two best scores differ by less than any rounding of a logarithm could, the kernel decides
    nothing, and `verify` answers with torch's token. Conclusive: the second of two tokens with close noise is given
    the logit that makes both scores equal but for the rounding of float32 (some 10^-11); with one that is 10^-4 away
    the kernel decides, each way as torch does.
    """
    width = 4096
    values, order = noise(range(5, 6), width)[0].sort()
    gaps = values.diff()
    place = int(torch.where(values[:-1] > 0, gaps, 9.0).argmin())
    low, high = int(order[place]), int(order[place + 1])
    logits = torch.full((1, width), -200.0)
    logits[0, low] = 0.0
    params = ResolvedSamplingParams(rule=Rule.COUPLED, seed=SEED, prompt_length=1)
    request = VerificationRequest(params, 0, [0] * 5)
    for extra, wanted in ((0.0, None), (1e-4, high), (-1e-4, low)):
        logits[0, high] = extra - float(gaps[place])
        assert raced(logits, range(5, 6), 1.0) == [UNDECIDED if wanted is None else wanted]
        assert wanted is None or verify([request], [1], logits)[0].recovered_token_ids == (wanted,)
    logits[0, high] = -float(gaps[place])
    answer = verify([request], [1], logits)[0].recovered_token_ids
    assert answer == tuple(coupled.perturbed_token_ids(logits, request.contexts, None).tolist())


def test_numbers_that_are_none_are_left_to_torch() -> None:
    """Claim: a row of infinities or not-a-number ends without an answer of the kernel, or with a token of the row.
    Conclusive: each such row, and beside it one that must be decided as ever."""
    logits = torch.zeros(5, 300)
    logits[0] = math.nan
    logits[1] = -math.inf
    logits[2] = math.inf
    logits[3, 7] = math.nan
    found = raced(logits, range(5), 1.0)
    assert found[:3] == [UNDECIDED] * 3 and -1 <= found[3] < 300
    assert found[4] == int(noise(range(4, 5), 300).argmax())


def test_a_batch_of_all_kinds_of_rows_has_the_tokens_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: chains and trees, with a temperature alone and with every other parameter beside it, in one call, have
    the tokens that torch chooses for them. Conclusive: the same call without the kernel; the kernel is asked for the
    plain rows, and only for these.
    """
    torch.manual_seed(5)
    kinds: list[dict[str, object]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.05},
        {"temperature": 0.4},
        {"repetition_penalty": 1.3},
        {"logit_bias": ((3, 4.0),)},
        {"stop_token_ids": (1, 2), "min_tokens": 2},  # masked in the first two rows, plain in the others
    ]
    requests = []
    for number, own in enumerate(kinds):
        params = ResolvedSamplingParams(**{"rule": Rule.COUPLED, "seed": number, "prompt_length": 4, **own})
        requests.append(VerificationRequest(params, 1, [1, 2, 3, 4], (5, 6, 7), (), ()))
        requests.append(VerificationRequest(params, 1, [1, 2, 3, 4], (5, 6, 7, 8), (), (0, 0, 1, 2)))
    counts = [request.row_count for request in requests]
    logits = torch.randn(sum(counts), 500) * 3
    asked: list[int] = []

    def counted(native: Kernels, rows: torch.Tensor, keys: list[int], temperatures: list[float]) -> list[int]:
        asked.append(len(rows))
        return race(native, rows, keys, temperatures)

    monkeypatch.setattr(coupled, "race", counted)
    found = verify(requests, counts, logits)
    assert asked == [9 + 9 + 4]
    monkeypatch.setattr(coupled, "kernels_for", lambda logits: None)
    assert verify(requests, counts, logits) == found


@pytest.mark.parametrize("width", [1, 2, 17, 256, 257, 4096])
def test_guesses_are_the_likeliest_with_their_shares(width: int) -> None:
    """Claim: a draft's guesses are the tokens with the largest scores, and their shares those of the softmax over all
    tokens, to 10^-5; tokens of probability 0 are no guesses. Conclusive: against float64 over all tokens, for flat and
    steep rows; a share is wrong if any token is counted twice, left out, or given another's noise."""
    native = kernels()
    assert native is not None
    torch.manual_seed(width)
    rows, count = 40, min(4, width)
    for number, (scale, temperature) in enumerate(((0.0, 1.0), (3.0, 0.7), (30.0, 2.0))):
        logits = torch.randn(rows, width) * scale
        logits[:, 1::3] = -math.inf
        positions = range(100 * number, 100 * number + rows)
        keys = [stream_key(SEED, Lane.GUMBEL, position) for position in positions]
        wanted = (logits.double() / temperature + noise(positions, width)).softmax(1).topk(count, dim=1)
        ids, shares = guess(native, logits, keys, [temperature] * rows, count)
        assert torch.allclose(torch.tensor(shares, dtype=torch.float64), wanted.values, rtol=1e-5, atol=1e-20)
        is_clear = wanted.values > 1e-12
        assert torch.equal(torch.tensor(ids)[is_clear], wanted.indices[is_clear])


@pytest.mark.parametrize("width", [1, 2, 17, 256, 257, 9001])
def test_guesses_without_noise_are_the_largest_the_first_of_equal_ones(width: int) -> None:
    """Claim: without keys the guesses are the tokens with the largest logits, of equal ones the first column's, also
    where a float32 weight of both would be the same, and the shares those of the softmax; tokens are named as asked.
    Conclusive: against a stable sort, with rounded logits of which many are equal and with neighbouring numbers."""
    native = kernels()
    assert native is not None
    rows, count = 30, min(5, width)
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)) * 3
    logits[:10].round_()
    logits[10] = -math.inf
    logits[10, ::2] = 2.0
    logits[11, -1] = logits[11].amax().nextafter(torch.tensor(math.inf))
    order = logits.sort(dim=1, descending=True, stable=True)
    names = 7 * torch.arange(width)
    ids, shares = guess(native, logits, None, [1.0] * rows, count, names)
    is_any = order.values[:, :count] > -math.inf
    assert torch.equal(torch.tensor(ids), names[order.indices[:, :count]].where(is_any, 0))
    assert torch.allclose(torch.tensor(shares), logits.softmax(1).gather(1, order.indices[:, :count]), rtol=1e-5)
