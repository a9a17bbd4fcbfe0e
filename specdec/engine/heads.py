"""Heads on a target: proposals for later positions from its last hidden state, as in Medusa (Cai et al. 2024, arXiv
2401.10774, section 2.1).

Head h = 1, 2, ... is one residual block, x + silu(x W_h + b_h), before the target's own output layer. From the final
hidden state of a row it predicts the token h positions after the row's own next one. The output layer is the target's,
not one a head, so a set of heads is small: hidden size squared, per head.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import silu

from specdec.errors import ModelRefused
from specdec.folders import has_file, read_json
from specdec.protocol.heads import HEADS_MAX

CONFIG_FILE = "heads.json"
WEIGHTS_FILE = "heads.safetensors"


class Heads(nn.Module):
    """The residual blocks of all heads, in float32. A new one returns the hidden state as it is: it predicts the row's
    own next token, from which training starts."""

    def __init__(self, head_count: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(head_count, hidden_size, hidden_size))  # [heads, in, out]
        self.bias = nn.Parameter(torch.zeros(head_count, hidden_size))

    @property
    def head_count(self) -> int:
        return self.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.weight.shape[1]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden] -> inputs of the output layer [rows, heads, hidden], both in float32."""
        return torch.stack([self.of(index, hidden) for index in range(self.head_count)], 1)

    def of(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the inputs of the output layer of one head, from 0.  # [rows, hidden] float32 each"""
        return hidden + silu(torch.addmm(self.bias[index], hidden, self.weight[index]))


def save_heads(heads: Heads, folder: Path, target_digest: str) -> None:
    """Writes weights in bfloat16, and the sizes with the digest of their target."""
    tensors = {name: value.detach().cpu().bfloat16().contiguous() for name, value in heads.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).chmod(0o644)  # written readable by its owner alone
    facts = {"head_count": heads.head_count, "hidden_size": heads.hidden_size, "target_digest": target_digest}
    (folder / CONFIG_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def load_heads(folder: Path, target_digest: str, hidden_size: int) -> Heads:
    """Returns the heads in a folder. Raises ModelRefused for a folder without heads, for heads of another target and
    for weights of other sizes than stated."""
    if not has_file(folder / CONFIG_FILE) or not has_file(folder / WEIGHTS_FILE):
        raise ModelRefused(f"{folder} has no {CONFIG_FILE} and {WEIGHTS_FILE}: make heads with specdec distill --heads")
    facts = read_json(folder / CONFIG_FILE)
    if facts.get("target_digest") != target_digest:
        raise ModelRefused(
            f"{folder} has heads of another target (digest {str(facts.get('target_digest'))[:12]}, of this target "
            f"{target_digest[:12]}): make them with specdec distill --heads for this one"
        )
    head_count = facts.get("head_count")
    if type(head_count) is not int or not 1 <= head_count <= HEADS_MAX:
        raise ModelRefused(f"{folder}/{CONFIG_FILE}: head_count is {head_count!r}; it must be 1 to {HEADS_MAX}")
    if facts.get("hidden_size") != hidden_size:
        stated = facts.get("hidden_size")
        raise ModelRefused(f"{folder}/{CONFIG_FILE}: hidden_size is {stated!r}; the target has {hidden_size}")
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except (SafetensorError, OSError) as error:
        raise ModelRefused(f"{folder / WEIGHTS_FILE} is not a safetensors file: {error}") from None
    heads = Heads(head_count, hidden_size)
    _check_shapes(folder, {name: value.shape for name, value in tensors.items()}, heads)
    heads.load_state_dict({name: value.float() for name, value in tensors.items()})
    return heads.requires_grad_(False).eval()


def _check_shapes(folder: Path, found: dict[str, Sequence[int]], heads: Heads) -> None:
    for name, wanted in heads.state_dict().items():
        if tuple(found.get(name, ())) != tuple(wanted.shape):
            shape = list(found.get(name, ()))
            raise ModelRefused(f"{folder / WEIGHTS_FILE}: {name} has shape {shape}; it must be {list(wanted.shape)}")
