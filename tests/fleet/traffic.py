"""Conversations that share common beginnings, as token ids and the digests of their blocks: a workload from a seed.

A message is one token id, repeated: no two messages have the same block, and equal beginnings have equal digests.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

from specdec.protocol.prefix_digests import chain_digests, root_digest
from specdec.protocol.routing import BLOCK_SIZE

SYSTEM_PROMPT_COUNT, SYSTEM_TOKENS = 40, (250, 2000)  # used by Zipf's distribution
MESSAGE_TOKENS, ANSWER_TOKENS, TURNS = (20, 250), (30, 250), (1, 9)  # least and most, each as likely
TURNS_MEAN = sum(TURNS) / 2
EDITED_SHARE = 0.05  # of the turns: the last message is written anew
ROOT = root_digest("")


@dataclass(slots=True, eq=False)
class Text:
    """One turn of a conversation: its prompt, the digests of the prompt's full blocks, where its last message begins,
    the tokens of its answer, and how many turns follow."""

    prompt: list[int]
    digests: list[bytes]
    message_start: int
    answer: list[int]
    turns_left: int

    def answered_digests(self) -> list[bytes]:
        """The digests of prompt and answer."""
        return extended(self.digests, self.prompt + self.answer)


def extended(digests: list[bytes], tokens: list[int]) -> list[bytes]:
    """The digests of `tokens`, whose first blocks have these."""
    parent = digests[-1] if digests else ROOT
    return [*digests, *chain_digests(parent, tokens[len(digests) * BLOCK_SIZE :], BLOCK_SIZE)]


class Traffic:
    """Makes texts."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._message_count = 0
        self._system_prompts = [self._message(SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPT_COUNT)]
        self._weights = list(accumulate(1 / (rank + 1) for rank in range(SYSTEM_PROMPT_COUNT)))

    def first(self) -> Text:
        """The first turn of a conversation."""
        return self._first(self._rng.randint(*TURNS))

    def under_way(self) -> Text:
        """A turn of one of the conversations that a fleet has at one time: of long ones there are more."""
        counts = range(TURNS[0], TURNS[1] + 1)
        text = self._first(self._rng.choices(counts, counts)[0])
        for _ in range(self._rng.randint(0, text.turns_left)):
            text = self.following(text)
        return text

    def _first(self, turn_count: int) -> Text:
        system_prompt = self._rng.choices(self._system_prompts, cum_weights=self._weights)[0]
        return self._turn(system_prompt, [], turn_count - 1)

    def following(self, text: Text) -> Text:
        """The next turn; of an edited one the first part stays."""
        if self._rng.random() < EDITED_SHARE:
            kept = text.digests[: text.message_start // BLOCK_SIZE]
            return self._turn(text.prompt[: text.message_start], kept, text.turns_left - 1)
        return self._turn(text.prompt + text.answer, text.digests, text.turns_left - 1)

    def _turn(self, before: list[int], digests: list[bytes], turns_left: int) -> Text:
        prompt = before + self._message(MESSAGE_TOKENS)
        return Text(prompt, extended(digests, prompt), len(before), self._message(ANSWER_TOKENS), turns_left)

    def _message(self, lengths: tuple[int, int]) -> list[int]:
        self._message_count += 1
        return [self._message_count] * self._rng.randint(*lengths)
