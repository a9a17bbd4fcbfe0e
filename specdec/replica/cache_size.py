"""How large a replica's cache is: in bytes as the operator says, as a share of free memory, or for a few sessions."""

from __future__ import annotations

from specdec.config import ModelSettings
from specdec.engine.devices import find_device, free_memory_bytes
from specdec.engine.interface import CausalModel
from specdec.errors import ConfigError
from specdec.protocol.types import CacheSize

FULL_SESSION_COUNT_DEFAULT = 16  # sessions of full length the default cache holds
MEMORY_SHARE_DEFAULT = 0.25  # of free memory, at most, where nothing is said


def choose_cache_size(model: CausalModel, positions_max: int, settings: ModelSettings) -> CacheSize:
    """What `--kv-cache-bytes` or `--kv-cache-memory-share` allow, once the weights are loaded; else room for a few
    sessions of `positions_max` positions. Raises ConfigError when that is less than a block for use.

    One block more is allocated: the zero block, which no session uses.
    """
    block_bytes = model.cache_bytes_per_position * settings.block_size
    flag, allowed = "", 0
    if settings.kv_cache_bytes is not None:
        flag, allowed = f"--kv-cache-bytes is {settings.kv_cache_bytes}", settings.kv_cache_bytes
    else:
        share = settings.kv_cache_memory_share
        free_bytes = free_memory_bytes(find_device(settings.device))
        flag, allowed = f"{free_bytes} bytes are free", int(free_bytes * (share or MEMORY_SHARE_DEFAULT))
        if share is None:
            session_count = min(settings.max_num_seqs, FULL_SESSION_COUNT_DEFAULT)
            wanted = 1 + session_count * -(-positions_max // settings.block_size)
            allowed = min(allowed, wanted * block_bytes)
    count = allowed // block_bytes - 1
    if count < 1:
        raise ConfigError(f"{flag}: too little for a cache; two blocks take {2 * block_bytes} bytes")
    return CacheSize(count, settings.block_size, count * block_bytes)
