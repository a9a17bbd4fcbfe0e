"""The generations: prompts from the shipped held-out ones, reproducible sampling parameters, ways to speculate.

Every prompt is generated with speculation and without. Pure: the same numbers give the same generations.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specdec.folders import tokenizer_file
from tests.support.harness import heldout_prompts
from tests.support.services import MODELS, SHAPES, fixed

WINDOW_TOKENS_MIN = 4
PREDICTED = 64  # tokens of a prompt that are predicted to come again, for ways with such a proposer
JOINED_MAX = 6  # held-out prompts in one, some 600 tokens: beyond prefill chunks and splits of attention
ALL_PARAMS: dict[str, dict[str, Any]] = {
    "GREEDY": {"temperature": 0.0},
    "COUPLED, 0.7": {"temperature": 0.7},
    "GREEDY, repetition 1.1": {"temperature": 0.0, "repetition_penalty": 1.1},
    "COUPLED, 1, top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
}
TREES = {
    f"tree of {rows} rows": fixed(
        rows, draft_window=rows, draft_nodes_per_step=2, draft_siblings=min(3, rows - 1), draft_wait_ms=5
    )
    for rows in (2, 3, 5, 16)
}
HEADS_WAY = "all proposers, heads"
TREES[HEADS_WAY] = {
    **SHAPES["all proposers"],
    "proposers": [*SHAPES["all proposers"]["proposers"], "PROPOSER_HEADS"],
}
WAYS = tuple(name for name in {**SHAPES, **TREES} if name != "off")


@dataclass(frozen=True, slots=True)
class Generation:
    """One prompt, its sampling parameters and its way to speculate."""

    index: int
    prompt: tuple[int, ...]
    params: str
    way: str

    def request(self, speculates: bool, max_tokens: int) -> dict[str, Any]:
        """The arguments of `Client.generate`. A seed of its own makes a sampled text reproducible."""
        seed = {} if ALL_PARAMS[self.params]["temperature"] == 0 else {"seed": 1000 + self.index}
        return {
            "prompt": self.prompt,
            "prediction": self.prompt[-PREDICTED:] if speculates else (),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "logprobs": 0,
            "speculative": {**SHAPES, **TREES}[self.way if speculates else "off"],
            **ALL_PARAMS[self.params],
            **seed,
        }


def heldout_token_ids(model: Path = MODELS / "target") -> list[list[int]]:
    """The shipped held-out prompts in the tokens of a model folder or GGUF file that is in use."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file(str(model))))
    return [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in heldout_prompts().values()]


def prompts_of(
    texts: Sequence[Sequence[int]], count: int, seed: int = 0, length_max: int | None = None
) -> list[tuple[int, ...]]:
    """`count` prompts, none twice: the texts whole, then in turn windows of them, beginnings, and runs of several, all
    cut at `length_max` tokens.

    Beginnings and runs share their first tokens with others, so cached prefixes are reused.
    """
    chance = random.Random(seed)
    made: dict[tuple[int, ...], None] = dict.fromkeys(tuple(text[:length_max]) for text in texts[:count])
    while len(made) < count:
        index = chance.randrange(len(texts))
        text = texts[index]
        end = chance.randint(min(WINDOW_TOKENS_MIN, len(text)), len(text))
        start = chance.randrange(max(1, end - WINDOW_TOKENS_MIN))
        joined = [token_id for own in texts[index : index + chance.randint(2, JOINED_MAX)] for token_id in own]
        chosen = (text[start:end], text[:end], joined)[chance.choices(range(3), (3, 1, 1))[0]]
        made[tuple(chosen[:length_max])] = None
    return list(made)


def generations(
    count: int, ways: Sequence[str] = WAYS, model: Path = MODELS / "target", length_max: int | None = None
) -> list[Generation]:
    """Returns `count` generations, in all combinations of sampling parameters and ways to speculate, with prompts in
    the tokens of a model folder, of at most `length_max`."""
    all_params = tuple(ALL_PARAMS)
    prompts = prompts_of(heldout_token_ids(model), count, length_max=length_max)
    return [
        Generation(index, prompt, all_params[index % len(all_params)], ways[index // len(all_params) % len(ways)])
        for index, prompt in enumerate(prompts)
    ]
