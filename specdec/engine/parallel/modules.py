"""What stands between a rank's share of a model and the whole: sums and lookups over ranks, in rank order.

Partial sums are added in float32, rank by rank, and rounded to the model's type once. So a row's bits depend on the
number of ranks and on nothing else: not on the batch, and not on which rank was late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specdec.engine.parallel.exchange import Exchange
from specdec.engine.parallel.split import Split
from specdec.engine.tiled_modules import TiledLinear
from specdec.errors import ModelRefused


def add_in_rank_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """((part 0 + part 1) + part 2) + ... in float32, whatever type the parts have."""
    total = torch.add(parts[0], parts[1]) if parts[0].dtype == torch.float32 else parts[0].float().add_(parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total


class RankSum(nn.Module):
    """A row-wise product: each rank multiplies its share of the inputs, and the results are added; the bias once."""

    def __init__(self, linear: nn.Module, exchange: Exchange) -> None:
        super().__init__()
        bias = getattr(linear, "bias", None)
        self.bias = None if bias is None else bias.detach().float()
        if isinstance(linear, Conv1D):
            linear.bias = nn.Parameter(torch.zeros_like(linear.bias), requires_grad=False)
        elif bias is not None:
            linear.bias = None  # type: ignore[assignment]
        self.linear = linear
        # Where there is a choice, in the type it was computed in.
        self._product = linear.product if isinstance(linear, TiledLinear) else linear
        self._exchange = exchange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., rows, in / ranks] -> [..., rows, out], the same on every rank."""
        parts = self._exchange.gather(self._product(x))
        if len(parts) == 2 and self.bias is None and parts[0].dtype == x.dtype:
            return torch.add(*parts)  # two narrow numbers are added in float32 and rounded once by the library too
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
        self._count = len(weight) * exchange.rank_count  # heads that several ranks hold count for each of them
        self._exchange = exchange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., rows, heads of this rank * head size] -> the same shape and type."""
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        total = add_in_rank_order(self._exchange.gather(squares))
        return torch.mul(x, total.div_(self._count).add_(self._epsilon).rsqrt_()).mul_(self.weight).to(x.dtype)


class SplitEmbedding(nn.Module):
    """A lookup in a vocabulary that ranks hold a part of each: all but one add zero, so the sum is exact."""

    def __init__(self, embedding: nn.Module, split: Split, exchange: Exchange) -> None:
        super().__init__()
        self.embedding = embedding
        self._first = split.rank * split.vocabulary_part
        self._last = split.vocabulary_part - 1
        self._exchange = exchange

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [..., rows] -> [..., rows, hidden]."""
        own = input_ids - self._first
        rows = self.embedding(own.clamp(0, self._last))
        rows = rows.masked_fill_(((own < 0) | (own > self._last))[..., None], 0)
        return add_in_rank_order(self._exchange.gather(rows)).to(rows.dtype)


class SplitOutput(nn.Module):
    """The output layer over a vocabulary that ranks hold a part of each; every rank has all logits in the end."""

    def __init__(self, output: nn.Module, vocabulary_size: int, exchange: Exchange) -> None:
        super().__init__()
        self.output = output
        self._vocabulary_size = vocabulary_size
        self._exchange = exchange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden] -> [rows, vocab] float32."""
        parts = self._exchange.gather(self.output(x))
        return torch.cat(list(parts), -1)[:, : self._vocabulary_size]


@dataclass(frozen=True, slots=True)
class NormParts:
    """A rank's part of a norm over all heads: its weights and its epsilon."""

    weight: torch.Tensor
    epsilon: float


def norm_parts(base: nn.Module, split: Split) -> dict[str, NormParts]:
    """The norms of a split, by path, from a base model whose modules are not replaced yet."""
    found: dict[str, NormParts] = {}
    for path in split.normed:
        norm = base.get_submodule(path)
        epsilon = float(norm.variance_epsilon)  # type: ignore[arg-type]
        found[path] = NormParts(norm.get_parameter("weight"), epsilon)
    return found


def join_shares(base: nn.Module, split: Split, norms: Mapping[str, NormParts], exchange: Exchange) -> None:
    """Puts the exchanges into a base model whose modules were replaced already. Raises ModelRefused where a module
    of the plan is not to be found any more."""
    for path, parts in norms.items():
        parent_path, _, leaf = path.rpartition(".")
        setattr(base.get_submodule(parent_path), leaf, SplitNorm(parts.weight, parts.epsilon, exchange))
    for path in split.summed:
        parent_path, _, leaf = path.rpartition(".")
        parent = base.get_submodule(parent_path)
        linear = getattr(parent, leaf, None)
        if not isinstance(linear, (TiledLinear, nn.Linear, Conv1D)):
            raise ModelRefused(f"module {path} of the tensor-parallel plan is a {type(linear).__name__} here")
        setattr(parent, leaf, RankSum(linear, exchange))
    for name, module in base.named_children():
        if isinstance(module, nn.Embedding) and module is base.get_input_embeddings():  # type: ignore[operator]
            setattr(base, name, SplitEmbedding(module, split, exchange))
