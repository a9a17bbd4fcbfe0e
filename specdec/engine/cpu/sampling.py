"""Sampling by native kernels: tokens under the noise of `COUPLED`, where nothing but a temperature changes logits.

A token of a text is decided here only if no other logarithm could choose another one: of two that are too close the
caller decides, as without kernels. A draft's guesses are near, not exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_double, c_float, c_int64, c_uint64
from typing import Any

import torch
from torch import Tensor

from specdec.engine.cpu.arguments import check_tensor, refuse
from specdec.engine.cpu.kernels import Kernels, kernels

UNDECIDED = -1


def kernels_for(logits: Tensor) -> Kernels | None:
    """Returns the kernels if they take these logits: float32 on a CPU, rows of at least one number."""
    is_float = logits.dtype is torch.float32 and logits.device.type == "cpu"
    return kernels() if is_float and logits.dim() == 2 and logits.shape[1] else None


def race(native: Kernels, logits: Tensor, keys: Sequence[int], temperatures: Sequence[float]) -> list[int]:
    """Returns of each row the token with the largest logit / temperature + noise of its key, or UNDECIDED.

    logits: see `kernels_for`; keys: of `protocol.noise.stream_key`; temperatures above 0. Raises ValueError.
    """
    logits, arguments = _arguments(logits, keys, temperatures)
    best = (c_int64 * len(keys))()
    native.library.sd_race(*arguments, best, torch.get_num_threads())
    return list(best)


def guess(
    native: Kernels,
    logits: Tensor,
    keys: Sequence[int] | None,
    temperatures: Sequence[float],
    count: int,
    token_ids: Tensor | None = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """Returns of each row the `count` tokens with the largest logit / temperature + noise, largest first, and their
    shares of the softmax of all; token 0 with share 0 where fewer have any. Arguments: see `race`; no keys: no noise.
    `token_ids` [tokens of a row] int64 of a CPU: of the columns; none: column i is token i."""
    if not 1 <= count <= logits.shape[-1]:
        refuse("count", count, f"from 1 to {logits.shape[-1]}, the tokens of a row")
    if token_ids is not None:
        check_tensor("token_ids", token_ids, torch.int64, (logits.shape[-1],))
    logits, (*place, its_keys, its_temperatures) = _arguments(logits, keys, temperatures)
    ids, shares = (c_int64 * (len(logits) * count))(), (c_float * (len(logits) * count))()
    named = None if token_ids is None else token_ids.data_ptr()
    threads = torch.get_num_threads()
    native.library.sd_guess(*place, named, its_keys, its_temperatures, count, ids, shares, threads)
    places = [slice(end - count, end) for end in range(count, len(ids) + 1, count)]
    return [ids[place] for place in places], [shares[place] for place in places]


def mask(native: Kernels, logits: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logits with -inf for every token whose bit is not set in its row's mask, in a copy, and which rows
    have nothing else. logits: see `kernels_for`; masks [rows, words] int32 (decoding/masks.py). Raises ValueError.
    # [rows, tokens] float32, [rows] bool"""
    rows, (data, stride, count, size) = _rows(logits)
    words = masks if masks.stride(-1) == 1 else masks.contiguous()
    if words.dtype is not torch.int32 or words.dim() != 2 or len(words) != count or words.shape[1] * 32 < size:
        refuse("masks", f"{masks.dtype} {list(masks.shape)}", f"torch.int32 [{count}, at least {-(-size // 32)}]")
    found, is_empty = torch.empty(count, size), torch.empty(count, dtype=torch.int32)
    places = words.data_ptr(), words.stride(0), found.data_ptr(), is_empty.data_ptr()
    native.library.sd_mask(data, stride, count, size, *places, torch.get_num_threads())
    assert len(rows) == count, "kept during the call"
    return found, is_empty.bool()


def _rows(logits: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """Returns the rows, to be kept during a call, with their place, stride, number and size. Raises ValueError."""
    if kernels_for(logits) is None:
        refuse("logits", f"{logits.dtype} {list(logits.shape)}", "torch.float32 [rows, tokens] of a CPU, at least one")
    count, size = logits.shape
    rows = logits if logits.stride(1) == 1 and logits.stride(0) >= size else logits.contiguous()
    return rows, (rows.data_ptr(), rows.stride(0), count, size)


def _arguments(
    logits: Tensor, keys: Sequence[int] | None, temperatures: Sequence[float]
) -> tuple[Tensor, tuple[Any, ...]]:
    """Returns the rows, to be kept during a call, and the call's first arguments. Raises ValueError."""
    rows, place = _rows(logits)
    count = len(rows)
    if not len(temperatures) == (count if keys is None else len(keys)) == count:
        shown = f"{'no' if keys is None else len(keys)} and {len(temperatures)}"
        refuse("keys and temperatures", shown, f"one for each of {count} rows")
    return rows, (*place, None if keys is None else (c_uint64 * count)(*keys), (c_double * count)(*temperatures))
