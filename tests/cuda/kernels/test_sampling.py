"""The kernels that sample on a device make the decisions of `specdec.decoding`, in Triton's interpreter.

Tiles are a few columns wide here, so that rows of small vocabularies have several, and their ends lie inside one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from specdec.decoding import device_edits, device_sampler, host_copy, logprobs, verification
from specdec.decoding.masks import word_count
from specdec.decoding.prompt_logprobs import PromptRows, prompt_logprobs
from specdec.decoding.verification import VerificationRequest, verify
from specdec.engine.cuda.kernels import edits as edit_kernels
from specdec.engine.cuda.kernels import logprobs as logprob_kernels
from specdec.engine.cuda.kernels import sampling as kernels
from specdec.protocol.types import DraftProbs, ResolvedSamplingParams, Rule, SamplerOutput
from tests.support.dispatched import Dispatched
from tests.support.interpreter import interpreted

CPU = torch.device("cpu")
PROMPT = [3, 1, 4, 1, 5]
LAUNCHES_MAX = 25
DISTRIBUTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 1},
    {"top_k": 3, "min_p": 0.2},
    {"top_p": 0.6},
    {"top_p": 0.9, "temperature": 2.0},
    {"top_p": 0.5, "top_k": 6},
    {"top_p": 0.0001},
    {"min_p": 0.3},
    {"top_p": 0.95, "min_p": 0.05, "temperature": 0.3},
)
EDITS: tuple[dict[str, Any], ...] = (
    {"logit_bias": ((1, 2.5), (4, -3.0), (99, 1.0))},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"repetition_penalty": 0.7, "logit_bias": ((0, 0.3),)},
    {"allowed_token_ids": (0, 2, 3, 6, 99)},
    {"bad_words": ((2,), (4, 1), (0, 3))},
    {"min_tokens": 7, "stop_token_ids": (0, 5)},
    {"allowed_token_ids": (0, 5), "min_tokens": 7, "stop_token_ids": (0, 5), "presence_penalty": 1.0},
)


@contextmanager
def with_kernels(tile: int) -> Iterator[list[str]]:
    """Samples by the kernels, with tiles of `tile` columns; the names of those launched, and copies to the device."""
    launched: list[str] = []
    run, sent = kernels.run, host_copy.sent

    def named(kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel.__name__)
        with _disable_current_modes():  # the interpreter computes by torch
            run(kernel, *arguments, **constants)

    def counted(*arguments: Any) -> torch.Tensor:
        launched.append("a copy to the device")
        return sent(*arguments)

    with (
        mock.patch.multiple(kernels, TILE=tile, RANKED=4, TOUCHED_MIN=8, run=named),
        mock.patch.multiple(edit_kernels, TILE=tile, BLOCK=4, run=named),
        mock.patch.multiple(logprob_kernels, TILE=tile, run=named),
        mock.patch.multiple(host_copy, is_device=lambda device: True, sent=counted),
        mock.patch.object(device_edits, "sent", counted),
        mock.patch.multiple(verification, is_device=lambda device: True, is_usable=lambda device: True, TRIED={CPU}),
        mock.patch.object(logprobs, "is_usable", lambda device: True),
    ):
        yield launched


def request_of(rule: Rule, policy: dict[str, Any], width: int, seed: int) -> VerificationRequest:
    """A chain of draft tokens, or a tree with siblings."""
    source = random.Random(seed)
    temperature = 0.0 if rule is Rule.GREEDY else policy.get("temperature", 0.8)
    params = ResolvedSamplingParams(rule, seed, 2, **{**policy, "temperature": temperature})
    drafted = tuple(source.sample(range(width + (policy.get("logprobs") is None)), 3))
    probs = []
    for _ in drafted if rule is Rule.REJECTION else ():
        ids = tuple(sorted({*drafted, *source.sample(range(width + 2), 3)}))
        probs.append(DraftProbs(ids, tuple(source.randrange(1, 65536) for _ in ids)))
    return VerificationRequest(params, seed, PROMPT, drafted, tuple(probs), (0, 0, 2) if seed % 2 else ())


def requests_of(width: int, policies: Sequence[dict[str, Any]]) -> list[VerificationRequest]:
    chosen = itertools.product(Rule, policies)
    return [request_of(rule, policy, width, seed) for seed, (rule, policy) in enumerate(chosen)]


def logits_of(row_count: int, width: int, is_tied: bool) -> torch.Tensor:
    logits = 2 * torch.randn(row_count, width, generator=torch.Generator().manual_seed(width))
    return logits.round() if is_tied else logits


def masks_of(row_count: int, width: int) -> torch.Tensor:
    """Masks of some tokens, of all tokens in every third row, of none in every fourth."""
    masks = torch.randint(0, 1 << 31, (row_count, word_count(width)), generator=torch.Generator().manual_seed(1))
    masks[::3], masks[::4] = -1, 0
    return masks.to(torch.int32)


def sampled(requests: Sequence[VerificationRequest], logits: torch.Tensor, masks: torch.Tensor | None = None) -> list:
    return verify(requests, [request.row_count for request in requests], logits, masks=masks)


def assert_equal(found: Sequence[SamplerOutput], wanted: Sequence[SamplerOutput]) -> None:
    """Equal tokens; numbers that differ by the rounding of sums in another order."""
    for own, one in zip(found, wanted, strict=True):
        assert own.recovered_token_ids == one.recovered_token_ids
        assert own.target_probs == pytest.approx(one.target_probs, rel=1e-12, abs=1e-300)
        assert own.draft_logprobs == pytest.approx(one.draft_logprobs, rel=1e-12)
        for mine, its in zip(own.recovered_logprobs, one.recovered_logprobs, strict=True):
            assert mine.top_token_ids == its.top_token_ids
            assert (mine.logprob, *mine.top_logprobs) == pytest.approx((its.logprob, *its.top_logprobs), rel=1e-12)


@interpreted
@pytest.mark.parametrize("is_tied", [False, True])
def test_distributions(is_tied: bool) -> None:
    """Claim: under every rule, with every parameter of the distribution, chains and trees with siblings, the kernels
    choose the tokens of torch and find its target probabilities, also of ties across every limit; a row's numbers do
    not depend on the other rows, bit for bit. Source: docs/exactness.md.

    Conclusive: an independent program; another top_p and another seed, in the last lines, are noticed."""
    width = 11
    requests = requests_of(width, DISTRIBUTIONS)
    logits = logits_of(4 * len(requests), width, is_tied)
    wanted = sampled(requests, logits)
    with with_kernels(4) as launched:
        found = sampled(requests, logits)
        assert len(launched) == 6
        assert_equal(found, wanted)
        alone = [sampled([requests[index]], logits[4 * index : 4 * index + 4])[0] for index in (10, 12, 14, 23)]
    assert alone == [found[index] for index in (10, 12, 14, 23)]
    for change in ({"top_p": 0.3}, {"seed": 99}):
        changed = [
            VerificationRequest(
                ResolvedSamplingParams(**{n: getattr(r.params, n) for n in r.params.__dataclass_fields__} | change),
                *(r.round_index, r.committed, r.draft_token_ids, r.draft_probs, r.parents),
            )
            for r in requests
        ]
        with pytest.raises(AssertionError):
            assert_equal(sampled(changed, logits), wanted)


@interpreted
@pytest.mark.parametrize("has_masks", [False, True])
def test_edits_and_logprobs(has_masks: bool) -> None:
    """Claim: the kernels edit logits as torch does, each edit alone and beside others, masks and edits that would leave
    no token among them, and report its log-probabilities with the lowest ids of ties first; those of a prompt's rows
    have the same bits. In at most 25 launches for all of them together, copies and torch's own operations included.

    Conclusive: tied logits, so a wrong count, order or tie moves a token; launches are counted where torch dispatches
    them and where kernels are launched; without the edits the comparison fails."""
    width = 9
    policies = [policy | {"logprobs": n} for n, policy in enumerate((*EDITS, {"top_p": 0.7}, {"top_k": 2}))]
    requests = requests_of(width, policies)
    logits = logits_of(4 * len(requests), width, True)
    masks = masks_of(len(logits), width) if has_masks else None
    wanted = sampled(requests, logits, masks)
    with with_kernels(4) as launched:
        with Dispatched() as counted:
            found = sampled(requests, logits, masks)
        launches = [*launched, *counted.names, "the copy to the host"]
        prompt = prompt_logprobs(PromptRows(1, [0] * 4, 2), logits[8:12])
    assert_equal(found, wanted)
    assert len(launches) <= LAUNCHES_MAX and counted.names.count("cat") == 1, launches
    assert prompt.top_logprobs[2:4] == [*found[2].recovered_logprobs[1].top_logprobs]
    plain = requests_of(width, [{"logprobs": 0}] * len(policies))
    with pytest.raises(AssertionError):
        assert_equal(sampled(plain, logits, masks), wanted)


@interpreted
def test_a_nucleus_beyond_the_ranked_tokens_is_found() -> None:
    """Claim: where a nucleus is larger than the tokens that were ranked, the step's tokens are those of torch."""
    requests = [request_of(Rule.COUPLED, {"top_p": 0.99, "temperature": 9.0}, 40, seed) for seed in range(4)]
    logits = logits_of(16, 40, False)
    wanted = sampled(requests, logits)
    with with_kernels(16) as launched, mock.patch.object(device_sampler, "ASSUMED_NUCLEUS_COLUMNS", 8):
        assert_equal(sampled(requests, logits), wanted)
        assert len(launched) == 6


@interpreted
def test_kernels_that_fail_or_choose_otherwise_are_not_used() -> None:
    """Claim: at the first use the kernels of a device are compared with torch; one that raises, or chooses another
    token, ends their use with a line in the log, and the step is sampled by torch. Conclusive: right ones stay."""
    logits, requests = logits_of(4, 9, False), [request_of(Rule.COUPLED, {}, 9, 1)]
    wanted = sampled(requests, logits)

    def broken(values: torch.Tensor, tables: kernels.Tables, ranked: object) -> torch.Tensor:
        raise RuntimeError("no compiler")

    def wrong(values: torch.Tensor, tables: kernels.Tables, ranked: object) -> torch.Tensor:
        return kernels.sample(values, tables._replace(numbers=tables.numbers * 2), ranked)

    refused: list[str] = []
    for other, reasons in ((None, []), (broken, ["no compiler"]), (wrong, ["it chose other tokens than torch"])):
        refused.clear()
        with (
            with_kernels(16),
            mock.patch.multiple(verification, TRIED=set(), TRIED_WIDTH=12, is_usable=lambda device: not refused),
            mock.patch.object(verification, "refuse", lambda device, reason: refused.append(reason)),
            mock.patch.object(device_sampler, "sample", other or kernels.sample),
        ):
            assert_equal(sampled(requests, logits), wanted)
            assert refused == reasons
