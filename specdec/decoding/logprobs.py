"""Log-probabilities as reported to users: the log-softmax of the raw logits, before any edit or truncation.

Float64 from float32 logits, the normaliser summed in id order, so a row's values do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.decoding.crossing import Crossing
from specdec.decoding.distribution import likeliest, row_totals
from specdec.protocol.types import PositionLogprobs


def position_logprobs(
    logits: Tensor, token_ids: Tensor, top_count: int, crossing: Crossing
) -> Callable[[], list[list[PositionLogprobs]]]:
    """For each row, one entry per asked token id, each with the row's `top_count` likeliest tokens; once crossed.

    logits: [rows, vocabulary] float32; token_ids: [rows, asked per row] int64. Likeliest first, ties to the lowest id.
    A token the logits give no probability at all has -inf.
    """
    values = logits.to(torch.float64)
    shifted = values - values.amax(dim=1, keepdim=True)
    logprobs = shifted - row_totals(shifted.exp()).log()
    chosen = crossing.bring(logprobs.gather(1, token_ids))
    if top_count == 0:
        return lambda: [[PositionLogprobs(value) for value in line] for line in chosen()]
    ids = likeliest(values, [top_count] * len(values), crossing)[0]
    top = values.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    ids = ids.gather(1, top)
    top_ids, top_values = crossing.bring(ids), crossing.bring(logprobs.gather(1, ids))

    def finish() -> list[list[PositionLogprobs]]:
        tops = [(tuple(ids), tuple(values)) for ids, values in zip(top_ids(), top_values())]
        return [[PositionLogprobs(value, *top) for value in line] for line, top in zip(chosen(), tops)]

    return finish
