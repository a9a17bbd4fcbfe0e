"""Memory of a rank: measured on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.rank_processes import (
    SHAPE,
    TINY_SHAPE,
    VOCABULARY_SIZE,
    cache_bytes,
    measure_memory,
    write_model,
)

CONSTANT_MIB = 40  # shared memory, one weight being read and turned, and what libraries allocate on the way


@pytest.mark.slow
@pytest.mark.parametrize("rank_count", [2, 4])
def test_a_rank_takes_its_share_of_memory(tmp_path: Path, rank_count: int) -> None:
    """Claim: the peak of a rank is about 1/N of the weights plus a constant.

    Conclusive: the kernel's own high-water mark from the first import on, less that of a rank of a tiny model; a rank
    that read the whole file at any time would exceed it by half the file.
    """
    folder = write_model(tmp_path / "model", SHAPE, torch.bfloat16)
    tiny_folder = write_model(tmp_path / "tiny", TINY_SHAPE, torch.bfloat16)
    weights = (folder / "model.safetensors").stat().st_size
    output_layer = VOCABULARY_SIZE * SHAPE["hidden_size"] * 4  # kept in float32 beside the embedding
    (measured,) = measure_memory(folder, tiny_folder, [rank_count])
    share_mib = (weights + output_layer + cache_bytes()) / rank_count / 2**20
    assert 0.8 * share_mib < measured.model_mib < share_mib + CONSTANT_MIB, measured
