"""Log-probabilities of the tokens of rows: the log-softmax of the raw logits, before any edit or truncation.

Values are float64, the normaliser summed in an order that depends on the column alone, so a row's values do not depend
on the rows beside it: on a CPU in id order, by a device's kernels in tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from specdec.decoding.distribution import likeliest, row_totals
from specdec.decoding.host_copy import HostCopy, sent, sent_together
from specdec.engine.cuda.kernels.launch import is_usable
from specdec.engine.cuda.kernels.logprobs import row_logprobs
from specdec.protocol.tree_shape import children
from specdec.protocol.types import PositionLogprobs, ResolvedSamplingParams

# Of a request: of each draft token, and per row of the recovered token.
Reported: TypeAlias = tuple[tuple[float, ...], tuple[PositionLogprobs, ...]]
Lines: TypeAlias = list[list[PositionLogprobs]]  # per row an entry for each of its tokens


class Drafted(Protocol):
    """What is read of a `VerificationRequest`."""

    @property
    def params(self) -> ResolvedSamplingParams: ...
    @property
    def draft_token_ids(self) -> tuple[int, ...]: ...
    @property
    def parents(self) -> tuple[int, ...]: ...
    @property
    def row_count(self) -> int: ...


def logprobs_of_rows(
    requests: Sequence[Drafted],
    recovered: Tensor,
    logits: Tensor,
    places: Sequence[slice],
    host_copy: HostCopy,
) -> list[Callable[[], Reported]]:
    """Returns for each request a function for the log-probabilities of draft and recovered tokens; none for one that
    has no `logprobs`. `recovered` [rows] int64; `places`: the rows of each request."""

    def of(request: Drafted, place: slice) -> Callable[[], Reported]:
        if request.params.logprobs is None:
            return nothing
        filled = sent(draft_tokens(request), logits.device, torch.int64)
        token_ids = torch.cat([recovered[place, None], filled.view(request.row_count, -1)], dim=1)
        lines = position_logprobs(logits[place], token_ids, request.params.logprobs, host_copy)
        return lambda: reported(request, lines())

    return [of(request, place) for request, place in zip(requests, places)]


def logprobs_by_kernels(
    requests: Sequence[Drafted],
    recovered: Tensor,
    logits: Tensor,
    places: Sequence[slice],
    host_copy: HostCopy,
) -> list[Callable[[], Reported]]:
    """`logprobs_of_rows` of all requests together, on a device with kernels. `recovered` [rows] float64."""
    asked = [(r, place) for r, place in zip(requests, places) if r.params.logprobs is not None]
    if not asked:
        return [nothing] * len(requests)
    rows = [row for _, place in asked for row in range(place.start, place.stop)]
    drafted = [line for request, _ in asked for line in draft_tokens(request)]
    most = 1 + max(map(len, drafted))
    tokens = [token_id for line in drafted for token_id in (0, *line, *[0] * (most - 1 - len(line)))]
    its_rows, its_tokens = sent_together((rows, tokens), (), logits.device)
    top_count = max(request.params.logprobs or 0 for request, _ in asked)
    found = row_logprobs(logits, its_rows, its_tokens.view(-1, most), recovered, top_count)
    lines = entries_of(found, most, host_copy)
    starts = {row: index for index, row in enumerate(rows)}

    def of(request: Drafted, place: slice) -> Callable[[], Reported]:
        count = request.params.logprobs
        if count is None:
            return nothing
        start = starts[place.start]
        return lambda: reported(request, fewer(lines()[start : start + request.row_count], count))

    return [of(request, place) for request, place in zip(requests, places)]


def nothing() -> Reported:
    """Returns no log-probabilities."""
    return (), ()


def draft_tokens(request: Drafted) -> list[list[int]]:
    """Returns the draft tokens that follow each row, padded with 0 to the same number."""
    following = children(request.parents, len(request.draft_token_ids))
    most = max(map(len, following))
    return [[request.draft_token_ids[index] for index in row] + [0] * (most - len(row)) for row in following]


def reported(request: Drafted, lines: Lines) -> Reported:
    """Returns a request's log-probabilities; of each line the first entry is the recovered token's."""
    following = children(request.parents, len(request.draft_token_ids))
    of_draft = {index: entry.logprob for row, line in zip(following, lines) for index, entry in zip(row, line[1:])}
    return tuple(of_draft[index] for index in range(len(of_draft))), tuple(line[0] for line in lines)


def fewer(lines: Lines, top_count: int) -> Lines:
    """Returns entries with at most `top_count` likeliest tokens."""
    return [
        [PositionLogprobs(e.logprob, e.top_token_ids[:top_count], e.top_logprobs[:top_count]) for e in line]
        for line in lines
    ]


def entries_of(found: Tensor, token_count: int, host_copy: HostCopy) -> Callable[[], Lines]:
    """Returns a function for the entries that the kernels found: see `kernels.logprobs.row_logprobs`."""
    read, end = host_copy.to_host(found), (token_count + found.shape[1]) // 2  # of the likeliest ids

    def entries() -> Lines:
        tops = [(tuple(int(i) for i in line[token_count:end]), tuple(line[end:])) for line in read()]
        return [[PositionLogprobs(value, *top) for value in line[:token_count]] for line, top in zip(read(), tops)]

    return entries


def position_logprobs(
    logits: Tensor, token_ids: Tensor, top_count: int, host_copy: HostCopy
) -> Callable[[], list[list[PositionLogprobs]]]:
    """Returns a function for one entry per row and token id, each with the row's `top_count` likeliest tokens.

    Values are the log-softmax of the raw logits, before any edit or truncation: float64, the normaliser summed in id
    order, so a row's values do not depend on the rows beside it.
    logits: [rows, vocabulary] float32; token_ids: [rows, ids per row] int64. Likeliest first, ties to the lowest id. A
    token of probability 0 has -inf.
    """
    if is_usable(logits.device):
        rows = torch.arange(len(logits), device=logits.device)
        return entries_of(row_logprobs(logits, rows, token_ids, None, top_count), token_ids.shape[1], host_copy)
    values = logits.to(torch.float64)
    shifted = values - values.amax(dim=1, keepdim=True)
    logprobs = shifted - row_totals(shifted.exp()).log()
    chosen = host_copy.to_host(logprobs.gather(1, token_ids))
    if top_count == 0:
        return lambda: [[PositionLogprobs(value) for value in line] for line in chosen()]
    ids = likeliest(values, [top_count] * len(values), host_copy)[0]
    top = values.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    ids = ids.gather(1, top)
    top_ids, top_values = host_copy.to_host(ids), host_copy.to_host(logprobs.gather(1, ids))

    def finish() -> list[list[PositionLogprobs]]:
        tops = [(tuple(ids), tuple(values)) for ids, values in zip(top_ids(), top_values())]
        return [[PositionLogprobs(value, *top) for value in line] for line, top in zip(chosen(), tops)]

    return finish
