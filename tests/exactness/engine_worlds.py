"""Worlds of the enumeration whose logits are those of the engine's own steps.

The target distribution is that of an output decoded token by token; each verification is one step, as the target's
service feeds it. The target's logits are rounded to even whole numbers, so that all shares are fractions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as Folder

import torch

from specdec.engine.interface import Chunk, RaggedBatch, tree_paths
from specdec.protocol.offer import Offer
from tests.exactness.enumeration import Path, Setting
from tests.exactness.siblings import SiblingWorld
from tests.support.engine_models import Driver


class Stepper:
    """A model's logits after a path, from steps of the engine. A path begins with the encoder's input, if there is one;
    `encoder_input`: the tokens that are really encoded in its place."""

    def __init__(self, folder: Folder, encoder_length: int = 0, encoder_input: Path = ()):
        self.driver = Driver.load(folder, block_count=8)
        self.table = self.driver.open(64, encoder_input)
        if encoder_input:
            self.driver.feed(self.table, encoder_input, 0)
        self.encoder_length = encoder_length
        self.cells: Path | None = None  # the path in the cache
        self.known: dict[Path, torch.Tensor] = {}

    def alone(self, path: Path) -> torch.Tensor:
        """The logits after a path, decoded token by token: [vocab] float32."""
        if path not in self.known:
            self.hold(path)
        return self.known[path]

    def hold(self, path: Path) -> None:
        """Rolls back to what the cache has of a path, and decodes the rest."""
        cells = path[: self.encoder_length] if self.cells is None else self.cells
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(cells, path))
        self.cells = path[: len(list(pairs))]
        self.driver.cache.truncate(self.table, len(self.cells))
        while len(self.cells) < len(path):
            token_id = path[len(self.cells)]
            self.cells = (*self.cells, token_id)
            self.known[self.cells] = self.driver.feed(self.table, [token_id], 1)[0]

    def verified(self, path: Path, tokens: Path, parents: Sequence[int] = ()) -> torch.Tensor:
        """The logits of a verification's rows, all in one step, for a chain or a tree: [rows, vocab] float32."""
        self.hold(path[:-1])
        end = len(path) + len(tokens)
        self.driver.cache.prepare_write(self.table, end)
        fed = [path[-1], *tokens]
        paths = tree_paths(parents, len(path))
        chunk = Chunk(self.table.block_ids, len(path) - 1, fed, len(fed), paths, self.encoder_length)
        return self.driver.model.forward(RaggedBatch((chunk,))).logits


def whole(row: torch.Tensor) -> tuple[int, ...]:
    """Even numbers: a repetition penalty of 2 leaves whole ones."""
    return tuple(2 * round(value / 2) for value in row.tolist())


@dataclass(kw_only=True)
class Chains(Setting):
    """A verification's rows are those of one step of the engine."""

    stepper: Stepper

    def lines(self, path: Path, tokens: Path) -> list[tuple[int, ...]]:
        return list(map(whole, self.stepper.verified(path, tokens)))


@dataclass(kw_only=True)
class Trees(SiblingWorld):
    """The same for trees, of which all draws are enumerated jointly, so that a step has the whole tree."""

    stepper: Stepper
    is_joint: bool = True

    def lines(self, path: Path, offer: Offer) -> list[tuple[int, ...]]:
        return list(map(whole, self.stepper.verified(path, offer.token_ids, offer.parents)))
