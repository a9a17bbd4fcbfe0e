"""The coordinator's side of a draft session: a held-out text, committed token by token.

The text is real: below its own guesses a small model soon repeats itself with certainty, and its tree is a chain.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from specdec.protocol.items import Commit, DraftItem, Extend, Nodes, Open
from specdec.protocol.types import ResolvedSamplingParams
from tests.support.harness import DRAFT_MODEL, heldout_prompts

WINDOW = 32
SPARE_TOKENS = 400  # tokens of a text beyond its context, committed during the measurement
NODES_A_COMMIT = {1: 12, 2: 12}  # by nodes per step
NODES_A_COMMIT_MAX = 16  # of wider trees: often hardly more nodes are likely enough to be evaluated


def texts_of(count: int, length: int) -> list[tuple[int, ...]]:
    """Returns `count` different pieces of held-out text of `length` tokens each."""
    tokenizer = Tokenizer.from_file(str(DRAFT_MODEL / "tokenizer.json"))
    stock = list(itertools.chain.from_iterable(tokenizer.encode(prompt).ids for prompt in heldout_prompts().values()))
    shift = (len(stock) - length) // count
    return [tuple(stock[index * shift : index * shift + length]) for index in range(count)]


def evaluated_count(nodes: Nodes) -> int:
    """The number of evaluated nodes: each has one proposal child."""
    return sum(node.proposal for node in nodes.nodes)


@dataclass(slots=True)
class Reader:
    """One session on a text, of which `length` tokens are committed; `fresh_count` nodes came since the last commit.
    Its commits tell of a wait: the nodes of every step come at once."""

    number: int
    text: Sequence[int]
    length: int
    nodes_per_step: int
    node_count: int = 0
    fresh_count: int = 0

    def opening(self, params: ResolvedSamplingParams, vocabulary_size: int) -> list[DraftItem]:
        """Opens the session with one node to grow, so that all is fed before anything is timed."""
        name, context = (self.number, 1), self.length
        own = replace(params, seed=self.number)  # no two sessions share their noise
        opened = Open(*name, own, len(self.text) + WINDOW, vocabulary_size)
        fed = Commit(*name, context, tuple(self.text[context - 1 : context]), window=1, wait_length=1)
        return [opened, Extend(*name, 0, tuple(self.text[: context - 1])), fed]

    def take(self, nodes: Nodes) -> int:
        """Counts an answer's evaluated nodes, and returns their number."""
        count = evaluated_count(nodes)
        self.node_count += count
        self.fresh_count += count
        return count

    @property
    def is_grown(self) -> bool:
        """Whether the next token is due, before the draft runs out of likely nodes."""
        return self.fresh_count >= NODES_A_COMMIT.get(self.nodes_per_step, NODES_A_COMMIT_MAX)

    def commit(self) -> Commit:
        """The next token of the text."""
        self.fresh_count = 0
        self.length += 1
        token_id = self.text[self.length - 1]
        return Commit(self.number, 1, self.length, (token_id,), WINDOW, self.nodes_per_step, wait_length=1)
