"""Modules that join the ranks' shares of a model: sums and lookups over ranks, in rank order.

Partial sums are added in float32, rank by rank, and rounded to the model's type once. So a row's bits depend on the
number of ranks only, not on the batch or on the timing of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from specdec.engine.backend import Product
from specdec.engine.cpu.kernels import kernels
from specdec.engine.linears import LinearProduct
from specdec.engine.parallel.exchange import Exchange
from specdec.engine.parallel.split import Split
from specdec.errors import ModelRefused


def add_in_rank_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns ((part 0 + part 1) + part 2) + ... in float32, for parts of any type."""
    total = torch.add(parts[0], parts[1]) if parts[0].dtype == torch.float32 else parts[0].float().add_(parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total


class RankSum(nn.Module):
    """A row-wise product: each rank multiplies its share of the inputs, and the results are added; the bias once."""

    def __init__(self, linear: Product, exchange: Exchange) -> None:
        super().__init__()
        self.bias = linear.take_bias()
        self.linear = linear  # a module
        self._product = linear.product
        self._exchange = exchange

    def total_of(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' parts, in float32."""
        return add_in_rank_order(self._exchange.gather(part))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., rows, in / ranks] -> [..., rows, out], the same on every rank."""
        parts = self._exchange.gather(self._product(x))
        if len(parts) == 2 and self.bias is None and parts[0].dtype == x.dtype:
            return torch.add(*parts)  # the library too adds two narrow numbers in float32 and rounds once
        total = add_in_rank_order(parts)
        if self.bias is not None:
            total.add_(self.bias)
        return total if total.dtype == x.dtype else total.to(x.dtype)


class SplitNorm(nn.Module):
    """A root-mean-square norm over all heads together, x / sqrt(mean(x^2) + epsilon) * weight, of one rank's heads."""

    def __init__(self, weight: torch.Tensor, epsilon: float, exchange: Exchange) -> None:
        super().__init__()
        self.weight = weight.detach().float()
        self._epsilon = epsilon
        self._count = len(weight) * exchange.rank_count  # heads held by several ranks count for each
        self._exchange = exchange
        self._kernels = kernels() if weight.device.type == "cpu" else None
        self._ones = self._kernels.pack(torch.ones(1, len(weight))) if self._kernels else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., rows, heads of this rank * head size] -> the same shape and type."""
        total = add_in_rank_order(self._exchange.gather(self._sum_of_squares(x)))
        return torch.mul(x, total.div_(self._count).add_(self._epsilon).rsqrt_()).mul_(self.weight).to(x.dtype)

    def _sum_of_squares(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., heads of this rank * head size] -> [..., 1] float32. By kernels, whose sums have one order."""
        if self._kernels and self._ones:
            return self._kernels.product(self._ones, x.float().square())
        lengths: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return lengths.square_()


class SplitEmbedding(nn.Module):
    """A lookup in a vocabulary split over ranks: all ranks but one add zero, so the sum is exact."""

    def __init__(self, embedding: nn.Module, split: Split, exchange: Exchange) -> None:
        super().__init__()
        self.embedding = embedding
        self._first = split.rank * split.vocabulary_part
        self._last = split.vocabulary_part - 1
        self._exchange = exchange

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [..., rows] -> [..., rows, hidden]."""
        self._exchange.begin()  # every step begins here
        own = input_ids - self._first
        rows = self.embedding(own.clamp(0, self._last))
        rows = rows.masked_fill_(((own < 0) | (own > self._last))[..., None], 0)
        return add_in_rank_order(self._exchange.gather(rows)).to(rows.dtype)


class SplitOutput(nn.Module):
    """The output layer over a vocabulary split over ranks; every rank gets all logits."""

    def __init__(self, output: nn.Module, vocabulary_size: int, exchange: Exchange) -> None:
        super().__init__()
        self.output = output
        self._vocabulary_size = vocabulary_size
        self._exchange = exchange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden] -> [rows, vocab] float32."""
        parts = self._exchange.gather(self.output(x))
        return torch.cat(list(parts), -1)[:, : self._vocabulary_size]


class JoinedShare:
    """Turns a model into one rank's share of a larger one; all ranks call it together.

    Made from a base model before its modules are replaced. `vocabulary_part`: number of ids with logits on this rank,
    padding included.
    """

    def __init__(self, base: nn.Module, split: Split, exchange: Exchange) -> None:
        self.vocabulary_part = split.vocabulary_part
        self._split = split
        self._exchange = exchange
        self._norms: dict[str, nn.Module] = {}
        for path in split.normed:
            norm = base.get_submodule(path)
            epsilon: Any = norm.variance_epsilon
            self._norms[path] = SplitNorm(norm.get_parameter("weight"), float(epsilon), exchange)

    def join(self, base: nn.Module) -> None:
        """Adds the exchanges to a base model whose modules were replaced. Raises ModelRefused if a module of the plan
        is missing."""
        for path, norm in self._norms.items():
            parent_path, _, attribute = path.rpartition(".")
            setattr(base.get_submodule(parent_path), attribute, norm)
        for path in self._split.summed:
            parent_path, _, attribute = path.rpartition(".")
            parent = base.get_submodule(parent_path)
            linear = getattr(parent, attribute, None)
            if not isinstance(linear, Product):
                raise ModelRefused(f"module {path} is a {type(linear).__name__}, whose parts ranks cannot add")
            setattr(parent, attribute, self._sum_of(linear))
        its: Any = base  # the method is of the architecture's class
        for name, module in base.named_children():
            if isinstance(module, nn.Embedding) and module is its.get_input_embeddings():
                setattr(base, name, SplitEmbedding(module, self._split, self._exchange))

    def _sum_of(self, linear: Product) -> nn.Module:
        if not self._exchange.is_captured:
            return RankSum(linear, self._exchange)
        from specdec.engine.parallel.symmetric import SymmetricExchange, SymmetricSum

        return SymmetricSum(cast(LinearProduct, linear), cast(SymmetricExchange, self._exchange))

    def whole_output(self, output: nn.Module, vocabulary_size: int) -> nn.Module:
        """Returns the output layer of all ranks together, made from this rank's part."""
        return SplitOutput(output, vocabulary_size, self._exchange)
