"""How often the target's token is the draft's first, second or third guess: the input of the simulated ceiling.

Measured with the functions of the services, on texts of the target, outside the services: the rate of the first guess
is compared with the acceptance that the services report.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from specdec.bench.harness import DRAFT_MODEL, TARGET_MODEL
from specdec.bench.pipeline.variants import rule_of
from specdec.decoding.proposal import Proposal, ProposalRequest, propose
from specdec.decoding.verification import VerificationRequest, verify
from specdec.models.agreement import Text, draft_logits, params_at, write_text
from specdec.protocol.noise import UNIFORM_BITS
from specdec.protocol.types import ResolvedSamplingParams, Rule

BRANCH_COUNT = 2


@dataclass(frozen=True, slots=True)
class Ranks:
    """Shares over positions. `branches`: that the second, third guess is right, where the first is wrong.
    `bonus_match`: that the first is right where it was not offered."""

    acceptance: float
    branches: tuple[float, ...]
    bonus_match: float


def measure_ranks(prompts: Sequence[str], rules: Sequence[str], token_count: int) -> dict[str, Ranks]:
    """By rule; the shipped target stands for the deepened one, which is the same function."""
    tokenizer = Tokenizer.from_file(str(TARGET_MODEL / "tokenizer.json"))
    target, draft = (LlamaForCausalLM.from_pretrained(folder).eval() for folder in (TARGET_MODEL, DRAFT_MODEL))
    outcomes: dict[str, list[tuple[int | None, bool]]] = {rule: [] for rule in rules}
    temperatures = {rule: rule_of(rule)[1] for rule in rules}
    for seed, prompt in enumerate(prompts):
        ids = tuple(tokenizer.encode(prompt).ids)
        for temperature in sorted(set(temperatures.values())):
            params = params_at(temperature, seed, len(ids))
            text = write_text(target, ids, params, token_count)
            logits = draft_logits(draft, text)
            for rule in (rule for rule in rules if temperatures[rule] == temperature):
                outcomes[rule] += outcomes_along(text, logits, replace(params, rule=rule_of(rule)[0]))
    return {rule: shares(found) for rule, found in outcomes.items()}


def outcomes_along(text: Text, logits: Tensor, params: ResolvedSamplingParams) -> list[tuple[int | None, bool]]:
    """Per output position: which guess came true, None for none, and whether the first equals an independent draw."""
    chance = random.Random(params.seed)
    width = text.logits.shape[1]
    requests = [
        ProposalRequest(params, text.before(index), width, (chance.getrandbits(UNIFORM_BITS),), BRANCH_COUNT)
        for index in range(len(text.output))
    ]
    proposals = propose(requests, logits)
    found: list[tuple[int | None, bool]] = []
    for index, (proposal, written) in enumerate(zip(proposals, text.output, strict=True)):
        came = written if params.rule is not Rule.REJECTION else None
        if came is None:
            came = token_by_rejection(params, text, index, proposal, chance.random())
        guesses = [token_id for token_id, _ in proposal.guesses]
        found.append((guesses.index(came) if came in guesses else None, guesses[0] == written))
    return found


def token_by_rejection(params: ResolvedSamplingParams, text: Text, index: int, proposal: Proposal, draw: float) -> int:
    """The token REJECTION commits at an output position when the proposal is offered there."""
    assert proposal.draft_probs is not None
    request = VerificationRequest(params, index, text.before(index), (proposal.token_id,), (proposal.draft_probs,))
    rows = torch.stack([text.logits[index]] * 2)  # the second position is unused
    answer = verify([request], [2], rows)[0]
    weights = dict(zip(proposal.draft_probs.token_ids, proposal.draft_probs.weights))
    draft_prob = weights[proposal.token_id] / proposal.draft_probs.total
    return proposal.token_id if draw * draft_prob < answer.target_probs[0] else answer.recovered_token_ids[0]


def shares(found: Sequence[tuple[int | None, bool]]) -> Ranks:
    """Counts put into ratios."""
    missed = [rank for rank, _ in found if rank != 0]
    branches = tuple(missed.count(rank) / max(1, len(missed)) for rank in range(1, BRANCH_COUNT + 1))
    return Ranks(1 - len(missed) / len(found), branches, sum(match for _, match in found) / len(found))
