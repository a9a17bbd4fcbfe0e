"""A draft that knows some of the target's tokens: proposals in its columns are those of logits spread over all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.decoding import noise, proposal
from specdec.decoding.masks import word_count
from specdec.decoding.proposal import KnownTokens, Proposal, ProposalRequest, propose
from specdec.protocol.types import ResolvedSamplingParams, Rule

ROWS, DRAWS = 40, (1 << 51, 3 << 51, 1 << 52)
TEMPERATURES = {Rule.GREEDY: 0.0, Rule.COUPLED: 0.7, Rule.REJECTION: 0.7}
SIZES = {
    "small": (300, 90),
    "large": (20_000, 3000),
}  # of the target, known: the large one has no noise of its own kept
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.01},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
    "bias": {"logit_bias": ((4, 3.0), (9, -2.0))},
    "allowed": {"allowed_token_ids": tuple(range(0, 250, 3))},
    "min_tokens": {"min_tokens": 30, "stop_token_ids": (1, 2, 3, 4)},
    "bad words": {"bad_words": ((5, 7), (8,))},
}


def known_tokens(size: int, count: int) -> KnownTokens:
    """Some tokens of a vocabulary, not its last."""
    generator = torch.Generator().manual_seed(size)
    return KnownTokens(torch.randperm(size - 1, generator=generator)[:count].sort().values)


def requests_of(rule: Rule, size: int, policy: dict[str, Any]) -> list[ProposalRequest]:
    """Of several sessions, several positions, and with guesses beside the proposal or none."""
    made = []
    for row in range(ROWS):
        params = ResolvedSamplingParams(rule, seed=row % 3, prompt_length=2, temperature=TEMPERATURES[rule], **policy)
        draws = DRAWS[: 1 + row % 3] if rule is Rule.REJECTION else ()
        made.append(ProposalRequest(params, [5, 8, *range(row % 7)], size, draws, row % 4))
    return made


def logits_of(count: int) -> Tensor:
    """As steep as those of language."""
    return torch.randn(ROWS, count, generator=torch.Generator().manual_seed(count)) * 4


def check_same(found: list[Proposal], wanted: list[Proposal], error: float = 1e-5) -> None:
    """Fails unless tokens and distributions are equal, and confidences to this error relative to their size."""
    for own, other in zip(found, wanted, strict=True):
        assert [token_id for token_id, _ in own.guesses] == [token_id for token_id, _ in other.guesses]
        assert own.draft_probs == other.draft_probs
        for (_, confidence), (_, expected) in zip(own.guesses, other.guesses):
            assert confidence == pytest.approx(expected, rel=error, abs=1e-12)


def check(rule: Rule, kind: str, policy: dict[str, Any]) -> None:
    size, count = SIZES[kind]
    known, logits, requests = known_tokens(size, count), logits_of(count), requests_of(rule, size, policy)
    error = 1e-3 if kind == "large" and rule is Rule.COUPLED else 1e-5  # shares: of all known tokens, or the likeliest
    check_same(propose(requests, logits, known=known), propose(requests, known.spread(logits)), error)


@pytest.fixture(params=["kernels", "torch"])
def _by_either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(proposal, "kernels_for", lambda logits: None)


@pytest.mark.usefixtures("_by_either")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("rule", TEMPERATURES)
def test_proposals_are_those_of_logits_spread_over_all_tokens(rule: Rule, kind: str, policy: str) -> None:
    """Claim: under every rule and parameter, with the kernels and without, guesses, draws and declared distributions
    are the same in the columns of the known tokens and over the whole vocabulary, where the others have -infinity.
    Conclusive: exact equality of tokens and distributions over 40 rows; mistakes are found (below)."""
    check(rule, kind, POLICIES[policy])


@pytest.mark.parametrize("rule", TEMPERATURES)
def test_masks_and_smaller_targets_apply_to_the_targets_ids(rule: Rule) -> None:
    """Claim: a mask, and the ids that a request's target lacks, concern tokens and not columns. Conclusive: against the
    spread logits, and every guess is legal; half of all columns are not."""
    size, count = SIZES["small"]
    known, logits, requests = known_tokens(size, count), logits_of(count), requests_of(rule, size, {})
    odd = torch.full((ROWS, word_count(size)), -0x55555556, dtype=torch.int32)  # bits 1, 3, ...
    found = propose(requests, logits, odd, known)
    check_same(found, propose(requests, known.spread(logits), odd))
    assert all(token_id % 2 for one in found for token_id, _ in one.guesses)
    fewer = requests_of(rule, size // 2, {})
    found = propose(fewer, logits, known=known)
    check_same(found, propose(fewer, known.spread(logits)))
    assert all(token_id < size // 2 for one in found for token_id, _ in one.guesses)


@pytest.mark.usefixtures("_by_either")
def test_the_noise_is_that_of_the_targets_ids() -> None:
    """Claim: under COUPLED the guesses are the known tokens of highest log p / temperature + noise of the target's id.
    Source: the definition, in float64 with `decoding.noise.gumbel`. Conclusive: every guess of 40 rows."""
    size, count = SIZES["large"]
    known, logits, requests = known_tokens(size, count), logits_of(count), requests_of(Rule.COUPLED, size, {})
    requests = [request._replace(branch_count=3) for request in requests]
    keys = noise.gumbel_keys([r.params.seed for r in requests], [len(r.path) for r in requests], torch.device("cpu"))
    raced = logits.double() / 0.7 + noise.gumbel(keys, known.ids[None])
    wanted = known.ids[raced.topk(4, dim=1).indices].tolist()
    assert [[token_id for token_id, _ in own.guesses] for own in propose(requests, logits, known=known)] == wanted


PLANTED: dict[str, tuple[Rule, Callable[[pytest.MonkeyPatch], None]]] = {}


def planted(rule: Rule) -> Callable[..., None]:
    def add(function: Callable[[pytest.MonkeyPatch], None]) -> None:
        PLANTED[function.__name__] = rule, function

    return add


@planted(Rule.COUPLED)
def noise_of_the_columns(patch: pytest.MonkeyPatch) -> None:
    own = proposal.guess

    def guess(native, logits, keys, temperatures, count, token_ids=None):
        columns, shares = own(native, logits, keys, temperatures, count)
        return columns if token_ids is None else token_ids[torch.tensor(columns)].tolist(), shares

    patch.setattr(proposal, "guess", guess)


@planted(Rule.GREEDY)
def columns_for_tokens(patch: pytest.MonkeyPatch) -> None:
    own = proposal.guess
    patch.setattr(proposal, "guess", lambda *given: own(*given[:5]))


@planted(Rule.REJECTION)
def columns_declared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(proposal, "tokens_at", lambda columns, known: columns)


@pytest.mark.parametrize("mistake", PLANTED)
def test_mistakes_are_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: the comparison finds planted mistakes. Conclusive: it passes without them, above."""
    if proposal.kernels_for(torch.zeros(1, 1)) is None and mistake != "columns_declared":
        pytest.skip("no native kernels here")
    rule, plant = PLANTED[mistake]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(rule, "small", {})


def test_all_tokens_may_be_known_in_another_order() -> None:
    """Claim: a map is by ids, not by their order. Conclusive: the logits of a permuted vocabulary, unpermuted."""
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    logits = logits_of(300)
    for rule in TEMPERATURES:
        requests = requests_of(rule, 300, {})
        check_same(propose(requests, logits[:, order], known=KnownTokens(order)), propose(requests, logits))
