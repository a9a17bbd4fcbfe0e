"""The prompts of the benchmarks on the chat model."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.prompts import (
    COPYING_KINDS,
    PROSE_KIND,
    Prompt,
    copying_prompts,
    copying_prompts_for_tuning,
    prose_prompts,
)
from specdec.folders import CHAT_PROMPTS, heldout_prompts

# Some 80 to 350 tokens of the chat model, and 10 to 40.
COPYING_CHARACTERS, PROSE_CHARACTERS = (250, 900), (40, 120)
COPIED_CHARACTERS_MIN = 60  # of a line that is the text itself; instructions end with a colon


def test_copying_prompts_are_of_three_kinds() -> None:
    """Claim: 40 measured prompts, a third of each kind, and 8 others with every kind among them."""
    assert Counter(own.kind for own in copying_prompts()) == dict(zip(COPYING_KINDS, (14, 13, 13)))
    tuning = copying_prompts_for_tuning()
    assert len(tuning) == 8 and {own.kind for own in tuning} == set(COPYING_KINDS)


def test_prose_prompts_are_new_questions() -> None:
    """Claim: 16 prompts of one kind, none of which is a question of the shipped chat prompts."""
    assert [own.kind for own in prose_prompts()] == [PROSE_KIND] * 16
    assert not {own.prompt for own in prose_prompts()} & set(heldout_prompts(CHAT_PROMPTS).values())


def test_no_prompt_is_measured_twice_or_tuned_on() -> None:
    """Claim: within and between the files no name and no prompt occurs twice, so none of the tuning prompts is
    measured; nor is the text that one asks to copy, under another instruction."""
    every = [*copying_prompts(), *copying_prompts_for_tuning(), *prose_prompts()]
    lines = [line for own in every if own.kind != PROSE_KIND for line in set(own.prompt.splitlines())]
    copied = [line for line in lines if len(line) > COPIED_CHARACTERS_MIN and not line.endswith(":")]
    for values in ([own.name for own in every], [own.prompt for own in every], copied):
        assert [value for value, count in Counter(values).items() if count > 1] == []


@pytest.mark.parametrize(
    ("prompts", "bounds"),
    [
        (copying_prompts(), COPYING_CHARACTERS),
        (copying_prompts_for_tuning(), COPYING_CHARACTERS),
        (prose_prompts(), PROSE_CHARACTERS),
    ],
    ids=["copying", "tuning", "prose"],
)
def test_prompts_are_of_their_size(prompts: list[Prompt], bounds: tuple[int, int]) -> None:
    """Claim: a copying prompt holds most of an answer and is not much longer; a prose prompt is one question."""
    shortest, longest = bounds
    assert {own.name: len(own.prompt) for own in prompts if not shortest <= len(own.prompt) <= longest} == {}
