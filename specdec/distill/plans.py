"""Which texts the target writes: answers to given prompts, to questions of its own, or continuations of given text."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from specdec.chat.template import ChatTemplate
from specdec.distill.writing import Passage, TextPlan
from specdec.errors import ConfigError

MARK = "\u241e"  # stands for the user's words while a template is rendered
QUESTION_TOKENS_MAX = 64


class Plans:
    """The plans of a model folder: `prompts`, if given, are asked in turn; else the target asks itself.

    Without a chat template a prompt is the text's beginning. Temperatures are taken in turn; `seed` decides all draws.
    Raises ConfigError for a template that is not valid, and without template and prompts.
    """

    def __init__(
        self,
        folder: Path,
        temperatures: Sequence[float],
        answer_tokens_max: int,
        seed: str,
        prompts: Sequence[str] = (),
    ) -> None:
        self._words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._prompts = prompts
        self._temperatures = temperatures
        self._answer_tokens_max = answer_tokens_max
        self._seed = seed
        self._parts = turn_parts(folder)
        if self._parts is None and not prompts:
            raise ConfigError(f"{folder} has no chat template, so the target cannot ask itself: give --prompts")

    def digest(self, first: int, count: int, target: str) -> str:
        """Returns a digest of everything that decides the texts first to first + count of the target of that digest."""
        facts = [target, first, count, self._temperatures, self._answer_tokens_max, self._seed, self._parts]
        return hashlib.sha256(json.dumps([*facts, list(self._prompts)]).encode()).hexdigest()

    def length_max(self, first: int, count: int) -> int:
        """The most tokens of any of these texts."""
        return max(plan.length_max for plan in self.make(first, count))

    def make(self, first: int, count: int) -> list[TextPlan]:
        """Returns plans first to first + count."""
        return [self._plan(index) for index in range(first, first + count)]

    def _plan(self, index: int) -> TextPlan:
        seed = random.Random(f"{self._seed}/{index}").getrandbits(64)
        temperature = self._temperatures[index % len(self._temperatures)]
        prompt = self._prompts[index // len(self._temperatures) % len(self._prompts)] if self._prompts else None
        if self._parts is None:
            assert prompt is not None
            ids = tuple(self._words.encode(prompt).ids)  # with the tokens that the tokenizer adds, as when served
            return TextPlan((Passage(ids, self._answer_tokens_max, temperature),), 0, seed)
        before, after = self._parts
        begin = self._encode(before)
        if prompt is not None:
            ids = self._encode(before + prompt + after)
            return TextPlan((Passage(ids, self._answer_tokens_max, temperature),), len(begin), seed)
        question = Passage(begin, QUESTION_TOKENS_MAX, 1.0)
        answer = Passage(self._encode(after), self._answer_tokens_max, temperature)
        return TextPlan((question, answer), len(begin), seed)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._words.encode(text, add_special_tokens=False).ids)


def turn_parts(folder: Path) -> tuple[str, str] | None:
    """Returns the text of a chat before the user's words and after them, up to the answer; None without a template.
    Raises ConfigError for a template that does not repeat the user's words once."""
    template = ChatTemplate.read(folder)
    if template is None:
        return None
    parts = template.render([{"role": "user", "content": MARK}]).split(MARK)
    if len(parts) != 2:
        raise ConfigError(f"the chat template of {folder} does not repeat the user's words once")
    return parts[0], parts[1]
