"""Weights in GGUF's formats Q4_K and Q6_K, which the package `gguf` does not write: the nearest numbers of each group.

Source: the structures of ggml-common.h.
"""

from __future__ import annotations

import numpy as np
import torch

BLOCK = 256  # weights


def stored_k(kind: str, weight: torch.Tensor) -> bytes:
    """Returns the bytes of a weight [out, in], `in` a multiple of BLOCK."""
    blocks = weight.float().numpy().reshape(-1, BLOCK)
    return (_q4_k if kind == "Q4_K" else _q6_k)(blocks).tobytes()


def _half(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of float16 numbers [blocks], and the numbers, none of them zero."""
    halves = np.maximum(numbers, 6e-8).astype(np.float16)
    return halves.view(np.uint8).reshape(-1, 2), halves.astype(np.float32)[:, None]


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 8, 32)
    least = np.minimum(groups.min(-1), 0)
    spans = (groups.max(-1) - least) / 15
    (scale_bytes, scale), (least_bytes, step) = _half(spans.max(-1) / 63), _half(-least.min(-1) / 63)
    scales = np.clip(np.rint(spans / scale), 1, 63).astype(np.uint8)
    offsets = np.clip(np.rint(-least / step), 0, 63).astype(np.uint8)
    shifted = groups + (step * offsets)[:, :, None]
    numbers = np.clip(np.rint(shifted / (scale * scales)[:, :, None]), 0, 15).astype(np.uint8)
    factors = np.concatenate(
        [
            scales[:, :4] | (scales[:, 4:] >> 4 << 6),
            offsets[:, :4] | (offsets[:, 4:] >> 4 << 6),
            (scales[:, 4:] & 15) | (offsets[:, 4:] << 4),
        ],
        axis=1,
    )
    pairs = numbers.reshape(-1, 4, 2, 32)
    return np.concatenate(
        [scale_bytes, least_bytes, factors, (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(-1, 128)], axis=1
    )


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    spans = np.abs(groups).max(-1) / 31
    scale_bytes, scale = _half(spans.max(-1) / 127)
    scales = np.clip(np.rint(spans / scale), 1, 127).astype(np.int8)
    numbers = np.clip(np.rint(groups / (scale * scales)[:, :, None]), -32, 31) + 32
    halves = numbers.astype(np.uint8).reshape(-1, 2, 128)
    low = (halves[:, :, :64] & 15) | ((halves[:, :, 64:] & 15) << 4)
    upper = (halves >> 4).reshape(-1, 2, 4, 32)
    high = upper[:, :, 0] | (upper[:, :, 1] << 2) | (upper[:, :, 2] << 4) | (upper[:, :, 3] << 6)
    return np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), scales.view(np.uint8), scale_bytes], axis=1)
