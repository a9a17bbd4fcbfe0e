"""Tiny models with the device backend, on a GPU where there is one, and varlen attention as torch documents it.

Without a GPU, planner, storage, padding, graph shapes and modules are the very code a GPU runs; attention is the plain
way, a captured graph a repeated call.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch

from specdec.engine import transformers_model
from specdec.engine.cuda.backend import DeviceBackend
from specdec.engine.loading.devices import find_device
from specdec.engine.loading.model import load_model
from specdec.engine.transformers_model import TransformersModel
from tests.support.engine_models import Driver

DEVICE = find_device("auto")
GRAPH_SEQUENCES_MAX = 4  # captured steps of more sequences are many and slow to repeat on a CPU


def load_on_device(
    folder: Path,
    with_graphs: bool,
    dtype: str = "float32",
    has_stable_rows: bool = True,
    sequences_max: int = GRAPH_SEQUENCES_MAX,
) -> TransformersModel:
    """A tiny model behind the device backend, on DEVICE."""

    def backend(
        device: torch.device,
        dtype: torch.dtype,
        positions_max: int,
        enforce_eager: bool,
        has_stable_rows: bool,
        dependent_launch: bool,
    ) -> DeviceBackend:
        return DeviceBackend(
            device, dtype, positions_max, with_graphs, sequences_max, not has_stable_rows, dependent_launch
        )

    with mock.patch.object(transformers_model, "backend_for", backend):
        model = load_model(str(folder), dtype, device=str(DEVICE), has_stable_rows=has_stable_rows)
    assert isinstance(model, TransformersModel)
    return model


def device_driver(
    folder: Path,
    with_graphs: bool,
    dtype: str = "float32",
    sequences_max: int = GRAPH_SEQUENCES_MAX,
    has_stable_rows: bool = True,
) -> Driver:
    """A driver of such a model."""
    return Driver(load_on_device(folder, with_graphs, dtype, has_stable_rows, sequences_max))


def documented_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """torch.nn.attention.varlen.varlen_attn, sequence by sequence, refusing what its kernel refuses.

    Rows of no sequence come back as not-a-number: the kernel leaves them unset.
    """
    assert query.dtype == key.dtype == value.dtype and query.dtype in (torch.bfloat16, torch.float16)
    for indices in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert indices is None or (indices.dtype == torch.int32 and indices.stride(-1) == 1)
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    sequence_count = len(cu_seq_q) - 1
    assert len(cu_seq_k) == sequence_count + 1
    heads, kv_heads = query.shape[1], key.shape[-2]
    assert heads == kv_heads or enable_gqa
    if block_table is not None:
        assert seqused_k is not None and len(seqused_k) == len(block_table) == sequence_count
        assert key.dim() == 4 and key.shape[1] % 256 == 0, "the kernel takes pages of a multiple of 256"
        assert num_splits == 1, "more splits leave rows of packed sequences unset (torch issue 194167)"
    if max_q == 1:
        assert len(query) == sequence_count, "single rows are reshaped to one a sequence"
    output = torch.full_like(query, torch.nan)
    left, right = window_size
    assert right == 0, "causal, or a window that ends at the row"
    for index in range(sequence_count):
        first, last = int(cu_seq_q[index]), int(cu_seq_q[index + 1])
        assert last - first <= max_q
        if block_table is not None:
            length = int(seqused_k[index])
            own = [cache[block_table[index].long()].flatten(0, 1)[:length] for cache in (key, value)]
        else:
            start, end = int(cu_seq_k[index]), int(cu_seq_k[index + 1])
            length = end - start
            own = [packed[start:end] for packed in (key, value)]
        assert length <= max_k and last - first <= length
        keys, values = (each.float().repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for each in own)
        rows = query[first:last].float().transpose(0, 1)  # [heads, rows, size]
        positions = torch.arange(length - (last - first), length)[:, None]
        distances = positions - torch.arange(length)
        is_hidden = (distances < 0) | (
            (distances > left) if left >= 0 else torch.zeros_like(distances, dtype=torch.bool)
        )
        scores = rows @ keys.transpose(1, 2) * (scale or query.shape[2] ** -0.5)
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        output[first:last] = (weights @ values).transpose(0, 1).to(query.dtype)
    return output
