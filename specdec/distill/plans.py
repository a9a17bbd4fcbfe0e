"""Which texts the target writes: answers to given prompts, to questions of its own, or continuations of given text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers

from specdec.chat.template import ChatTemplate
from specdec.distill.writing import Passage, TextPlan
from specdec.errors import ConfigError

MARK = "\u241e"  # stands for the user's words while a template is rendered
QUESTION_TOKENS_MAX = 64
Encode = Callable[[str], list[int]]


def encoder(folder: Path) -> Encode:
    """Returns a function from text to token ids, without tokens that the tokenizer would add."""
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: list(words.encode(text, add_special_tokens=False).ids)


def turn_parts(folder: Path) -> tuple[str, str]:
    """Returns the text of a chat before the user's words and after them, up to the answer. Raises ConfigError."""
    parts = ChatTemplate(folder).render([{"role": "user", "content": MARK}]).split(MARK)
    if len(parts) != 2:
        raise ConfigError(f"the chat template of {folder} does not repeat the user's words once")
    return parts[0], parts[1]


class Plans:
    """The plans of a model folder: `prompts`, if given, are asked in turn; else the target asks itself.

    Without a chat template a prompt is the text's beginning, and without prompts a text begins with nothing but
    `beginning`, the tokens before every text. Temperatures are taken in turn.
    """

    def __init__(
        self, folder: Path, temperatures: Sequence[float], answer_tokens_max: int, prompts: Sequence[str] = ()
    ) -> None:
        self._encode = encoder(folder)
        self._prompts = prompts
        self._temperatures = temperatures
        self._answer_tokens_max = answer_tokens_max
        self._parts: tuple[str, str] | None = None
        try:
            self._parts = turn_parts(folder)
        except ConfigError as error:
            if not prompts:
                raise ConfigError(f"the target cannot ask itself, so give --prompts: {error}") from None

    def make(self, first: int, count: int, seed: int) -> list[TextPlan]:
        """Returns plans first to first + count; the same for the same seed."""
        return [
            self._plan(index, random.Random(f"{seed}/{index}").getrandbits(64)) for index in range(first, first + count)
        ]

    def _plan(self, index: int, seed: int) -> TextPlan:
        temperature = self._temperatures[index % len(self._temperatures)]
        prompt = self._prompts[index // len(self._temperatures) % len(self._prompts)] if self._prompts else None
        if self._parts is None:
            assert prompt is not None
            ids = tuple(self._encode(prompt))
            return TextPlan((Passage(ids, self._answer_tokens_max, temperature),), 0, seed)
        before, after = self._parts
        if prompt is not None:
            ids = tuple(self._encode(before + prompt + after))
            return TextPlan((Passage(ids, self._answer_tokens_max, temperature),), len(self._encode(before)), seed)
        begin, middle = tuple(self._encode(before)), tuple(self._encode(after))
        question = Passage(begin, QUESTION_TOKENS_MAX, 1.0)
        return TextPlan((question, Passage(middle, self._answer_tokens_max, temperature)), len(begin), seed)
