"""Cache size from the operator's settings and the free memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.config import TargetSettings
from specdec.engine.loading.model import load_model
from specdec.engine.table_model import write_table_model
from specdec.errors import ConfigError
from specdec.protocol.types import CacheSize
from specdec.replica import loading
from specdec.replica.loading import FULL_SESSION_COUNT_DEFAULT, choose_cache_size

POSITIONS_MAX = 200
BLOCK_BYTES = 16 * 8  # blocks of 16 positions, 8 bytes each in a table model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_table_model(tmp_path, 5, positions_max=POSITIONS_MAX)
    return tmp_path


def size_of(folder: Path, **said: object) -> CacheSize:
    settings = TargetSettings(model=str(folder), block_size=16, device="cpu", **said)
    return choose_cache_size(load_model(str(folder)), POSITIONS_MAX, settings)


def test_bytes_shares_and_the_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: --kv-cache-bytes is the size of the cache, zero block included; a share is of free memory only; without
    either the cache holds 16 sessions of full length, or takes a quarter of free memory where that is less.

    Requirement: "sizes set by --kv-cache-bytes or a share of memory". Conclusive: block counts, to the block.
    """
    monkeypatch.setattr(loading, "free_memory_bytes", lambda device: 1000 * BLOCK_BYTES + 5)
    size = size_of(folder, kv_cache_bytes=40 * BLOCK_BYTES + 1)
    assert (size.block_count, size.position_count, size.byte_count) == (39, 39 * 16, 39 * BLOCK_BYTES)
    assert size_of(folder, kv_cache_memory_share=0.5).block_count == 499
    full_session_blocks = 13  # 200 positions
    assert size_of(folder).block_count == FULL_SESSION_COUNT_DEFAULT * full_session_blocks
    assert size_of(folder, max_num_seqs=2).block_count == 2 * full_session_blocks
    assert "3 sessions of full length (200)" in size.sentence(POSITIONS_MAX)
    monkeypatch.setattr(loading, "free_memory_bytes", lambda device: 400 * BLOCK_BYTES)
    assert size_of(folder).block_count == 99


def test_too_little_and_too_much_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: less than two blocks is a ConfigError with the bytes needed; both settings together are refused.

    Source: style.md, bound everything. Conclusive: the messages are read.
    """
    monkeypatch.setattr(loading, "free_memory_bytes", lambda device: BLOCK_BYTES)
    with pytest.raises(ConfigError, match=f"two blocks take {2 * BLOCK_BYTES} bytes"):
        size_of(folder, kv_cache_memory_share=0.9)
    with pytest.raises(ValueError, match="give one"):
        size_of(folder, kv_cache_memory_share=0.5, kv_cache_bytes=1 << 20)
