"""Float32 arithmetic with one rounding, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def fused(x: Array, weight: Array, sums: Array) -> Array:
    """round(x * weight + sums) of float32 numbers, rounded once.

    The product of two float32 numbers is exact in float64 (48 bits). Its sum with a third is computed with its error
    (Knuth's two-sum) and rounded to odd: where it is inexact, the last bit is set. Rounding that to float32 gives the
    rounding of the exact sum, as 53 >= 24 + 2 (Boldo and Melquiond 2008).
    """
    product, third = x.astype(np.float64) * weight, sums.astype(np.float64)
    total = product + third
    rest = total - product
    error = (product - (total - rest)) + (third - rest)
    whole = np.ascontiguousarray(total).view(np.int64)
    is_even = (error != 0) & (whole & 1 == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(is_even, whole + toward, whole).view(np.float64).astype(np.float32)
