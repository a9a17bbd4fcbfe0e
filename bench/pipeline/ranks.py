"""How often the target's token is the draft's first, second or third guess: the input of the simulated ceiling, and of
the best static tree.

Measured with the functions of the services, on texts of the target, outside the services: the rate of the first guess
is compared with the acceptance that the services report.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from bench.pipeline.variants import rule_of
from specdec.advise.agreement import Reader
from specdec.advise.measuring import EVERYTHING, Text, written
from specdec.decoding.proposal import Proposal, ProposalRequest, propose
from specdec.decoding.verification import VerificationRequest, verify
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.protocol.noise import UNIFORM_BITS
from specdec.protocol.rejection import decide
from specdec.protocol.types import ResolvedSamplingParams, Rule
from tests.support.harness import DRAFT_MODEL, TARGET_MODEL

BRANCH_COUNT = 3


@dataclass(frozen=True, slots=True)
class Ranks:
    """Shares over positions. `branches`: that the second, third guess is right, where the first is wrong.
    `bonus_match`: that the first is right where it was not offered. `texts`: which guess came true at each position of
    each text, None for none."""

    acceptance: float
    branches: tuple[float, ...]
    bonus_match: float
    texts: tuple[tuple[int | None, ...], ...] = ()


def measure_ranks(
    prompts: Sequence[str],
    rules: Sequence[str],
    token_count: int,
    with_siblings: bool = False,
    pair: tuple[Path, Path] = (TARGET_MODEL, DRAFT_MODEL),
) -> dict[str, Ranks]:
    """By rule; the shipped target stands for the deepened one, which is the same function. `with_siblings`: under
    REJECTION the guesses after the first are drawn and tested as siblings, as in a tree."""
    target, draft = (load_model(str(folder), "float32", has_stable_rows=False) for folder in pair)
    temperatures = {rule: rule_of(rule)[1] for rule in rules}
    about = ",".join(f"{one:g}" for one in sorted(set(temperatures.values()))), token_count, 0
    folder = open_model_folder(str(pair[0]))
    texts = written(target, folder, about, dict.fromkeys(prompts, EVERYTHING), Console(stderr=True))
    longest = max(len(text.token_ids) for text in texts)
    readers = Reader(target, longest), Reader(draft, longest)
    outcomes: dict[str, list[list[tuple[int | None, bool]]]] = {rule: [] for rule in rules}
    for text in texts:
        logits, guessed = (torch.cat(list(reader.read(text.token_ids[:-1], text.first))) for reader in readers)
        for rule in (rule for rule in rules if temperatures[rule] == text.params.temperature):
            params = replace(text.params, rule=rule_of(rule)[0])
            outcomes[rule].append(outcomes_along(text, logits, guessed, params, with_siblings))
    return {rule: shares(found) for rule, found in outcomes.items()}


def outcomes_along(
    text: Text, target_logits: Tensor, draft_logits: Tensor, params: ResolvedSamplingParams, with_siblings: bool
) -> list[tuple[int | None, bool]]:
    """Per output position: which guess came true, None for none, and whether the first equals an independent draw.

    target_logits, draft_logits: [output, vocab] float32
    """
    chance = random.Random(params.seed)
    output, width = text.token_ids[text.first + 1 :], target_logits.shape[1]
    paths = [text.token_ids[: text.first + 1 + index] for index in range(len(output))]
    draw_count = 1 + BRANCH_COUNT * with_siblings
    requests = [
        ProposalRequest(
            params, path, width, tuple(chance.getrandbits(UNIFORM_BITS) for _ in range(draw_count)), BRANCH_COUNT
        )
        for path in paths
    ]
    proposals = propose(requests, draft_logits)
    found: list[tuple[int | None, bool]] = []
    for path, logits, proposal, drawn in zip(paths, target_logits, proposals, output, strict=True):
        guesses = [token_id for token_id, _ in proposal.guesses]
        came = drawn
        if params.rule is Rule.REJECTION:
            offered = guesses[:draw_count]
            came = token_by_rejection(params, path, logits, proposal, offered, [chance.random() for _ in offered])
        found.append((guesses.index(came) if came in guesses else None, guesses[0] == drawn))
    return found


def token_by_rejection(
    params: ResolvedSamplingParams,
    path: Sequence[int],
    logits: Tensor,
    proposal: Proposal,
    offered: Sequence[int],
    draws: Sequence[float],
) -> int:
    """The token REJECTION commits after a path when these drawn tokens are offered there.  logits: [vocab] float32"""
    assert proposal.draft_probs is not None
    probs, parents = (proposal.draft_probs,) * len(offered), (0,) * len(offered)
    request = VerificationRequest(params, len(path), path, tuple(offered), probs, parents)
    rows = torch.stack([logits] * (1 + len(offered)))  # those after the tokens are unused
    answer = verify([request], [len(rows)], rows)[0]
    verdict = decide(params.rule, offered, probs, answer, draws, parents)
    return offered[verdict.accepted[0]] if verdict.accepted else answer.recovered_token_ids[0]


def shares(texts: Sequence[Sequence[tuple[int | None, bool]]]) -> Ranks:
    """Counts put into ratios, over all positions of all texts."""
    found = [outcome for text in texts for outcome in text]
    missed = [rank for rank, _ in found if rank != 0]
    branches = tuple(missed.count(rank) / max(1, len(missed)) for rank in range(1, BRANCH_COUNT + 1))
    came = tuple(tuple(rank for rank, _ in text) for text in texts)
    return Ranks(1 - len(missed) / len(found), branches, sum(match for _, match in found) / len(found), came)
