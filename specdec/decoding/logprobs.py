"""Log-probabilities as reported to users: the log-softmax of the raw logits, before any edit or truncation.

Float64 from float32 logits, the normaliser summed in id order, so a row's values do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.decoding.distribution import likeliest, row_totals
from specdec.protocol.types import PositionLogprobs


def position_logprobs(
    logits: Tensor, token_ids: Sequence[Sequence[int]], top_count: int
) -> list[list[PositionLogprobs]]:
    """For each row, one entry per asked token id, each with the row's `top_count` likeliest tokens.

    logits: [rows, vocabulary] float32; token_ids: [rows][asked per row], as many for every row. Likeliest first, ties
    to the lowest id. A token the logits give no probability at all has -inf.
    """
    values = logits.to(torch.float64)
    shifted = values - values.amax(dim=1, keepdim=True)
    logprobs = shifted - row_totals(shifted.exp()).log()
    asked = torch.tensor([list(ids) for ids in token_ids], dtype=torch.int64, device=logits.device)
    chosen = logprobs.gather(1, asked).tolist()
    if top_count == 0:
        return [[PositionLogprobs(value) for value in line] for line in chosen]
    ids = likeliest(values, [top_count] * len(values))[0]
    top = values.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    ids = ids.gather(1, top)
    top_ids, top_values = ids.tolist(), logprobs.gather(1, ids).tolist()
    return [
        [PositionLogprobs(value, tuple(top_ids[row]), tuple(top_values[row])) for value in line]
        for row, line in enumerate(chosen)
    ]
