"""A step reads no number of its device before the end: neither the forward nor the sampler.

Every read waits for all queued work, and a forward that reads cannot be captured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.decoding import host_copy as host_copy_module
from specdec.decoding import proposal as proposal_module
from specdec.decoding import verification as verification_module
from specdec.decoding.host_copy import HostCopy
from specdec.decoding.masks import word_count
from specdec.decoding.proposal import ProposalRequest, propose
from specdec.decoding.verification import VerificationRequest, verify
from specdec.protocol.types import DraftProbs, ResolvedSamplingParams, Rule
from tests.support.device_models import device_driver
from tests.support.engine_models import ARCHITECTURES, make_tiny_model, random_tokens

READING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "argwhere")


class Listener(TorchDispatchMode):
    """Records every operation whose result's shape, or the program's branch, depends on numbers of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0]
        masks = any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if name in ("index", "index_put", "index_put_") else ())
        )
        if name.startswith(READING) or masks:
            self.reads.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_forward_reads_nothing(architecture: str, tmp_path: Path) -> None:
    """Claim: no architecture's forward, modules of transformers included, contains an operation that reads a number of
    the device. Conclusive: every operation is dispatched through the listener, which does record one (last lines).
    """
    driver = device_driver(make_tiny_model(tmp_path / architecture, architecture), False)
    tables = [driver.open(), driver.open()]
    driver.step([(tables[0], random_tokens(60, 1), 1)])  # the first step measures the drift, once
    backend = driver.model.backend
    step, listener = backend._step, Listener()

    def heard(*arguments: Any) -> Any:
        with listener:
            return step(*arguments)

    backend._step = heard
    driver.step([(tables[0], random_tokens(3, 2), 3), (tables[1], random_tokens(1, 3), 1)])
    assert listener.reads == []
    with listener:
        int(torch.ones(1).sum())
    assert listener.reads == ["_local_scalar_dense"]


class NoWaitingCopies(TorchFunctionMode):
    """Fails where the making of a tensor on a device waits for the device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor):
            assert str(kwargs.get("device", "cpu")) == "cpu", "a tensor of numbers is made on the host, then sent"
        if function is torch.Tensor.to and "meta" in [str(part) for part in (*args[1:], *kwargs.values())]:
            assert kwargs.get("non_blocking"), "sending must not wait"
        return function(*args, **kwargs)


VOCABULARY = 5000
POLICIES: dict[str, dict] = {
    "greedy": {"rule": Rule.GREEDY, "temperature": 0.0},
    "coupled": {"rule": Rule.COUPLED, "temperature": 0.7},
    "coupled-top-p": {"rule": Rule.COUPLED, "temperature": 0.7, "top_p": 0.95},
    "rejection-top-k": {"rule": Rule.REJECTION, "temperature": 1.0, "top_k": 40, "min_p": 0.01},
    "rejection-top-p": {"rule": Rule.REJECTION, "temperature": 0.9, "top_p": 0.9},
    "penalties": {
        "rule": Rule.COUPLED,
        "temperature": 1.0,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "logit_bias": ((3, 1.5),),
        "stop_token_ids": (0,),
        "min_tokens": 9,
    },
    "logprobs": {"rule": Rule.GREEDY, "temperature": 0.0, "logprobs": 4},
}
DRAFT = (17, 4, 900)


def verification(policy: dict, seed: int) -> VerificationRequest:
    params = ResolvedSamplingParams(seed=seed, prompt_length=2, **policy)
    rows = tuple(DraftProbs(tuple(sorted({token, 5, 6, 4999})), (3,) * len({token, 5, 6, 4999})) for token in DRAFT)
    return VerificationRequest(params, 2, [8, 9, 17], DRAFT, rows if params.rule is Rule.REJECTION else ())


def proposal(policy: dict, seed: int) -> ProposalRequest:
    params = ResolvedSamplingParams(seed=seed, prompt_length=2, **policy)
    return ProposalRequest(params, [8, 9, 17], VOCABULARY - 10, draws=(seed << 20,), branch_count=seed % 3)


def masks_of(row_count: int) -> torch.Tensor:
    """Masks of every third token, of all tokens in every second row, on the host."""
    masks = torch.full((row_count, word_count(VOCABULARY)), 0x24924924, dtype=torch.int32)
    masks[1::2] = -1
    return masks


@pytest.fixture
def read_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The count of numbers in each copy to the host. Tensors on "meta" hold none: any other read raises."""
    counts: list[int] = []
    tolist = torch.Tensor.tolist

    def counted(self: torch.Tensor) -> list:
        if self.device.type != "meta":
            return tolist(self)
        counts.append(self.numel())
        return list(range(self.numel()))

    was_wrong = HostCopy.was_wrong
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    # Numbers that mean nothing make no rows, and no true assumptions.
    monkeypatch.setattr(HostCopy, "was_wrong", lambda self: was_wrong(self) and False)
    nothing = proposal_module.Proposal(((1, 1.0),), DraftProbs((1,), (1,)))
    monkeypatch.setattr(proposal_module, "proposal_of_weights", lambda *arguments: nothing)
    return counts


@pytest.mark.parametrize("name", POLICIES)
def test_verification_comes_back_in_one_small_copy(name: str, read_counts: list[int]) -> None:
    """Claim: the sampler output of all verifications of a step, whatever their rules and policies, is copied to the
    host at once, a few numbers a row, and nothing else is read; the same for all proposals of a draft's step.

    Conclusive: the logits lie on the meta device, whose tensors hold no numbers, so any other read raises.
    """
    policies = [POLICIES[name], *POLICIES.values()]
    verifications = [verification(policy, seed) for seed, policy in enumerate(policies)]
    row_counts = [request.row_count for request in verifications]
    with NoWaitingCopies():
        logits = torch.empty(sum(row_counts), VOCABULARY, device="meta")
        found = verify(verifications, row_counts, logits, masks=masks_of(sum(row_counts)))
        assert len(found) == len(verifications) and len(read_counts) == 1
        assert read_counts[0] <= 16 * sum(row_counts)
        read_counts.clear()
        proposals = [proposal(policy, seed) for seed, policy in enumerate(policies)]
        logits = torch.empty(len(proposals), VOCABULARY, device="meta")
        assert len(propose(proposals, logits, masks_of(len(proposals)))) == len(proposals)
    assert len(read_counts) == 1 and read_counts[0] <= 200 * len(proposals)


@pytest.mark.parametrize("are_tied", [False, True])
def test_assumptions_give_the_same_as_reads(are_tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: sampler output and proposals computed with assumptions, as on a device, equal those computed with reads,
    number for number; a wrong assumption is noticed and the computation repeated. Conclusive: the same logits through
    both; tied ones, flat ones and a top_p close to 1 break every assumption, and some did break.
    """
    generator = torch.Generator().manual_seed(3)
    policies = [*POLICIES.values(), {"rule": Rule.REJECTION, "temperature": 5.0, "top_p": 0.999}]
    verifications = [verification(policy, seed) for seed, policy in enumerate(policies)]
    proposals = [proposal(policy, seed) for seed, policy in enumerate(policies)]
    row_counts = [request.row_count for request in verifications]
    logits = torch.randn(sum(row_counts), VOCABULARY, generator=generator) * 2
    logits = logits.round() if are_tied else logits

    def both() -> tuple[list, list]:
        proposed = propose(proposals, logits[: len(proposals)], masks_of(len(proposals)))
        return verify(verifications, row_counts, logits, masks=masks_of(sum(row_counts))), proposed

    expected = both()
    found_wrong: list[bool] = []
    was_wrong = HostCopy.was_wrong
    monkeypatch.setattr(host_copy_module, "is_device", lambda device: True)
    monkeypatch.setattr(verification_module, "is_device", lambda device: True)
    monkeypatch.setattr(
        HostCopy, "was_wrong", lambda self: bool(found_wrong.append(was_wrong(self)) or found_wrong[-1])
    )
    assert both() == expected
    assert any(found_wrong)
    if not are_tied:
        del verifications[-1], row_counts[-1], proposals[-1], found_wrong[:]
        logits = logits[: sum(row_counts)]
        both()
        assert found_wrong and not any(found_wrong)
