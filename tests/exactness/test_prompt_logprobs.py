"""Log-probabilities of prompt rows: the formula, ranks, and bits that no division of the rows changes."""

from __future__ import annotations

import math
import random

import pytest
import torch

from specdec.decoding import prompt_logprobs as module
from specdec.decoding.prompt_logprobs import PromptRows, prompt_logprobs, with_prompt_rows
from specdec.decoding.verification import VerificationRequest, verify
from specdec.protocol.types import PromptLogprobs, ResolvedSamplingParams, Rule

ROWS, VOCABULARY_SIZE, TOP_COUNT = 23, 50, 3
PARAMS = ResolvedSamplingParams(Rule.GREEDY, seed=0, prompt_length=2, temperature=0.0, logprobs=TOP_COUNT)


def rows_and_tokens() -> tuple[torch.Tensor, tuple[int, ...]]:
    """Logits with ties in each row, one row with a token of probability 0, and a token for each row."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(ROWS, VOCABULARY_SIZE, generator=generator) * 8).round() / 4
    logits[3, 7] = -math.inf
    draw = random.Random(2)
    tokens = [draw.randrange(VOCABULARY_SIZE) for _ in range(ROWS)]
    tokens[3] = 7
    return logits, tuple(tokens)


def lists(found: PromptLogprobs) -> list[list[float]]:
    return [list(own) for own in found[1:]]


def test_numbers_are_those_of_the_formula() -> None:
    """Claim: log-probabilities are the log-softmax of the row, ranks count larger logits and equal ones of lower ids,
    the likeliest come in that order; a token of probability 0 has minus infinity.

    Conclusive: a plain Python program computes all of them from the numbers; logits are rounded, so rows have ties.
    """
    logits, tokens = rows_and_tokens()
    found = prompt_logprobs(PromptRows(5, tokens, TOP_COUNT), logits)
    assert (found.first_index, found.end_index, found.token_ids) == (5, 5 + ROWS, tokens)
    for row, token_id in enumerate(tokens):
        numbers = logits[row].tolist()
        total = math.fsum(math.exp(number) for number in numbers)
        order = sorted(range(VOCABULARY_SIZE), key=lambda own: (-numbers[own], own))
        place = slice(row * TOP_COUNT, (row + 1) * TOP_COUNT)
        assert found.top_token_ids[place] == order[:TOP_COUNT]
        assert found.ranks[row] == order.index(token_id) + 1
        expected = [numbers[own] - math.log(total) for own in (token_id, *order[:TOP_COUNT])]
        assert [found.logprobs[row], *found.top_logprobs[place]] == pytest.approx(expected, abs=1e-12)
    assert found.logprobs[3] == -math.inf and found.ranks[3] == VOCABULARY_SIZE


def test_bits_do_not_depend_on_the_division_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: in parts of any size, beside verifications and other prompts in one step, and with temporaries of one row
    or of many, every number has the same bits; they are those that a verification reports of the same row; and the
    verifications' results are those without them. Conclusive: all are compared exactly."""
    logits, tokens = rows_and_tokens()
    whole = lists(prompt_logprobs(PromptRows(1, tokens, TOP_COUNT), logits))
    request = VerificationRequest(PARAMS, 0, [1, 2], tokens[:-1])
    alone = verify([request], [ROWS], logits)
    sample = with_prompt_rows(verify)
    for size in (1, 2, 7, ROWS):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS_CPU", size * VOCABULARY_SIZE)
        asked = PromptRows(1, tokens, TOP_COUNT)
        parts = [asked.part(start, min(start + size, ROWS)) for start in range(0, ROWS, size)]
        assert [part.first_index for part in parts] == [1 + start for start in range(0, ROWS, size)]
        work = [parts[0], request, *parts[1:]]
        counts = [len(parts[0].token_ids), ROWS, *(len(part.token_ids) for part in parts[1:])]
        both = torch.cat([logits[: counts[0]], logits, logits[counts[0] :]])
        first, verified, *rest = sample(work, counts, both)
        assert verified == alone[0]
        joined: list[list[float]] = [[] for _ in whole]
        for part in (first, *rest):
            assert isinstance(part, PromptLogprobs)
            for own, more in zip(joined, part[1:]):
                own += list(more)
        assert joined == whole
    assert list(alone[0].draft_logprobs) == whole[1][:-1]
    assert [own for position in alone[0].recovered_logprobs for own in position.top_logprobs] == whole[4]
    assert sample([request], [ROWS], logits) == alone
