"""The target distribution: from logits to the distribution that tokens are drawn from.

Verification and plain decoding both use `sampled_distribution` (temperature above 0) or `greedy_token_ids` (GREEDY), so
they cannot differ. The order of the steps is part of the guarantee (docs/exactness.md): edits
(decoding/logits_processors.py), temperature, min_p, top_k, top_p, each over the remaining tokens, ties broken to the
lowest id.

A row's bits depend on its own logits and path only: every step is elementwise, a maximum, or a sum over the row's
tokens in id order. Sums over rows never use a reduction that may split them by the shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.decoding.host_copy import HostCopy, sent
from specdec.decoding.logits_processors import PathContext, edited_logits
from specdec.protocol.types import ResolvedSamplingParams

NUCLEUS_COLUMNS = (128, 1024, 8192, 32768)  # likeliest tokens that top_p searches before it sorts the vocabulary
ASSUMED_NUCLEUS_COLUMNS = 1024  # on a GPU, which avoids a wait: the median support under top_p is 3 to 14 tokens


@dataclass(frozen=True, slots=True)
class Support:
    """The target distribution of some rows over their candidate tokens, ids ascending within a row.

    `scores` are log-probabilities up to a constant per row, the likeliest token at 0; -inf marks a column outside the
    support, among them padding columns, whose id is 0. Every row has at least one token.
    """

    rows: list[int]  # indices of the rows of the call
    token_ids: Tensor | None  # [n, columns] int64; None if the columns are the whole vocabulary
    scores: Tensor  # [n, columns] float64

    @property
    def ids(self) -> Tensor:
        """The token id of every column, one row if all rows share them.  # [n or 1, columns] int64"""
        return every_token_id(self.scores) if self.token_ids is None else self.token_ids

    def probabilities(self) -> Tensor:
        """Returns the probabilities; the total is a sum in id order.  # [n, columns] float64"""
        weights = self.scores.exp()
        return weights.div_(row_totals(weights))

    def columns_of(self, index: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns, for pairs (index into `rows`, token id), the column and whether it exists.  # [m], [m] bool"""
        if self.token_ids is None:
            columns = token_ids.clamp(max=self.scores.shape[1] - 1)
            return columns, columns == token_ids
        match = (self.token_ids[index] == token_ids.unsqueeze(1)) & (self.scores[index] > -math.inf)
        return match.to(torch.int8).argmax(dim=1), match.any(dim=1)

    def token_ids_at(self, columns: Tensor) -> Tensor:
        """Returns the token ids of one column per row.  # [n] int64"""
        if self.token_ids is None:
            return columns
        return self.token_ids.gather(1, columns.unsqueeze(1)).squeeze(1)


SupportMethod = Callable[[Tensor, list[int], list[ResolvedSamplingParams], HostCopy | None], list[Support]]


def row_sums(values: Tensor) -> Tensor:
    """Returns running sums along each row of non-negative numbers, in id order.  # [n, columns] float64

    A CPU adds one element after the other for every shape. Other devices choose the order by the number of rows, so
    there `doubled_sums` fixes the order.
    """
    return values.cumsum(dim=1) if values.device.type == "cpu" else doubled_sums(values)


def doubled_sums(values: Tensor) -> Tensor:
    """Returns running sums by doubling: elementwise additions only, in an order that depends on the column only.

    Neighbouring sums are rounded differently, so a sum rises only at a positive value: a token without mass is never
    drawn. Columns of zeros at the end have no effect.  # [n, columns] float64
    """
    sums, reach = values, 1
    while reach < values.shape[1]:
        sums = torch.cat([sums[:, :reach], sums[:, reach:] + sums[:, :-reach]], dim=1)
        reach *= 2
    return torch.where(values > 0, sums, 0.0).cummax(dim=1).values


def row_totals(values: Tensor) -> Tensor:
    """Returns the sum of each row, its last running sum.  # [n, 1] float64"""
    return row_sums(values)[:, -1:]


def greedy_token_ids(logits: Tensor, contexts: Sequence[PathContext]) -> Tensor:
    """Returns the argmax of the edited logits, ties to the lowest id.  # [rows] int64"""
    return first_argmax(edited_logits(logits, contexts))


def first_argmax(values: Tensor) -> Tensor:
    """Returns the lowest column with its row's maximum.  # [rows] int64"""
    return values.argmax(dim=1)  # torch documents that the first of several maxima is returned


def sampled_distribution(
    logits: Tensor, contexts: Sequence[PathContext], host_copy: HostCopy | None = None
) -> list[Support]:
    """Returns the target distribution of every row, temperature above 0.  logits: [rows, vocabulary] float32

    `contexts` cover the rows in order, `context.row_count` each. Rows are grouped by the method that finds their
    support, which depends on a row's own params and logits only. `host_copy`: that of the surrounding computation.
    """
    edited = edited_logits(logits, contexts)
    all_params = [context.params for context in contexts for _ in range(context.row_count)]
    supports: list[Support] = []
    for find in (support_by_top_k, support_by_top_p, support_of_all):
        chosen = [row for row, params in enumerate(all_params) if support_method(params, logits.shape[1]) is find]
        if chosen:
            supports += find(taken(edited, chosen), chosen, [all_params[row] for row in chosen], host_copy)
    return supports


def support_method(params: ResolvedSamplingParams, width: int) -> SupportMethod:
    """Returns the cheapest method that finds the support of `params` over `width` tokens."""
    if 0 < params.top_k < width:
        return support_by_top_k
    return support_by_top_p if params.top_p < 1 else support_of_all


def dense_scores(logits: Tensor, contexts: Sequence[PathContext]) -> Tensor:
    """Returns `sampled_distribution` as one tensor, -inf outside, for tests.  # [rows, vocabulary] float64"""
    dense = torch.full(logits.shape, -math.inf, dtype=torch.float64, device=logits.device)
    for support in sampled_distribution(logits, contexts):
        inside = support.scores > -math.inf
        line, column = inside.nonzero(as_tuple=True)
        rows = sent(support.rows, logits.device)[line]
        dense[rows, support.ids.expand(inside.shape)[line, column]] = support.scores[line, column]
    return dense


def taken(values: Tensor, rows: list[int]) -> Tensor:
    """Returns those rows, ascending; without a copy if none is left out between them."""
    if not rows:
        return values[:0]
    is_whole = rows[-1] - rows[0] == len(rows) - 1
    return values[rows[0] : rows[-1] + 1] if is_whole else values[sent(rows, values.device)]


def in_row_order(parts: Sequence[tuple[list[int], Tensor]]) -> Tensor:
    """Returns one number per row, in row order, from groups that together contain all rows.  # [rows]"""
    if len(parts) == 1:
        return parts[0][1]
    rows = [row for part, _ in parts for row in part]
    places = sorted(range(len(rows)), key=rows.__getitem__)
    values = torch.cat([values for _, values in parts])
    return values[sent(places, values.device)]


def every_token_id(values: Tensor) -> Tensor:
    """Returns 0 to vocabulary - 1 as one row.  # [1, vocabulary] int64"""
    return torch.arange(values.shape[1], device=values.device).unsqueeze(0)


def per_row(numbers: list[float], like: Tensor) -> Tensor:
    """Returns a column of one number per row.  # [n, 1] float64"""
    return sent(numbers, like.device, torch.float64).unsqueeze(1)


def tempered(values: Tensor, maxima: Tensor, all_params: list[ResolvedSamplingParams]) -> Tensor:
    """Returns (values - row maximum) / temperature, the subtraction first.  # [n, columns] float64"""
    shifted = values.to(torch.float64, copy=True).sub_(maxima)
    return shifted.div_(per_row([params.temperature for params in all_params], values))


def without_improbable(tempered_scores: Tensor, all_params: list[ResolvedSamplingParams]) -> Tensor:
    """Sets tokens less likely than min_p times the likeliest, of score 0, to -inf in place.  # [n, columns]"""
    if all(params.min_p == 0 for params in all_params):
        return tempered_scores
    limits = per_row([math.log(params.min_p) if params.min_p else -math.inf for params in all_params], tempered_scores)
    return tempered_scores.masked_fill_(tempered_scores < limits, -math.inf)


def support_of_all(
    values: Tensor, rows: list[int], all_params: list[ResolvedSamplingParams], host_copy: HostCopy | None = None
) -> list[Support]:
    """Returns the support of rows with neither top_k nor top_p: every token above min_p."""
    scores = tempered(values, values.amax(dim=1, keepdim=True), all_params)
    return [Support(rows, None, without_improbable(scores, all_params))]


def support_by_top_k(
    values: Tensor, rows: list[int], all_params: list[ResolvedSamplingParams], host_copy: HostCopy | None
) -> list[Support]:
    """Returns the support of rows with top_k: later steps see only the k likeliest tokens.

    Here min_p follows top_k instead of preceding it: both keep the likeliest tokens, so the result is the same.
    """
    token_ids, used = likeliest(values, [params.top_k for params in all_params], host_copy)
    raw = values.gather(1, token_ids).masked_fill_(~used, -math.inf)
    kept = without_improbable(tempered(raw, raw.amax(dim=1, keepdim=True), all_params), all_params)
    weights = kept.exp()
    return [Support(rows, token_ids, nucleus(kept, weights, row_totals(weights), all_params)[0])]


def support_by_top_p(
    values: Tensor, rows: list[int], all_params: list[ResolvedSamplingParams], host_copy: HostCopy | None
) -> list[Support]:
    """Returns the support of rows with top_p only, found among the likeliest tokens or by sorting the vocabulary."""
    scores = support_of_all(values, rows, all_params)[0].scores
    totals = row_totals(scores.exp())
    if host_copy is not None and host_copy.assumes:
        return [assumed_nucleus(scores, rows, totals, all_params, host_copy)]
    supports: list[Support] = []
    for columns in NUCLEUS_COLUMNS:
        if 4 * columns > values.shape[1] or not all_params:
            break  # sorting the whole vocabulary is as fast here
        token_ids, _ = likeliest(scores, [columns] * len(all_params))
        compact = scores.gather(1, token_ids)
        kept, enough = nucleus(compact, compact.exp(), totals, all_params)
        was_found = enough.tolist()
        found = [index for index, is_found in enumerate(was_found) if is_found]
        missed = [index for index, is_found in enumerate(was_found) if not is_found]
        if found:
            supports.append(Support([rows[index] for index in found], taken(token_ids, found), taken(kept, found)))
        all_params, rows = [all_params[index] for index in missed], [rows[index] for index in missed]
        if missed:
            scores, totals = taken(scores, missed), taken(totals, missed)
    if all_params:
        supports.append(Support(rows, None, nucleus(scores, scores.exp(), totals, all_params)[0]))
    return supports


def assumed_nucleus(
    scores: Tensor, rows: list[int], totals: Tensor, all_params: list[ResolvedSamplingParams], host_copy: HostCopy
) -> Support:
    """`support_by_top_p` without a wait: assumes the nucleus among the ASSUMED_NUCLEUS_COLUMNS likeliest tokens."""
    if 4 * ASSUMED_NUCLEUS_COLUMNS > scores.shape[1]:
        return Support(rows, None, nucleus(scores, scores.exp(), totals, all_params)[0])
    token_ids, _ = likeliest(scores, [ASSUMED_NUCLEUS_COLUMNS] * len(all_params), host_copy)
    compact = scores.gather(1, token_ids)
    kept, enough = nucleus(compact, compact.exp(), totals, all_params)
    host_copy.assume_none(~enough)
    return Support(rows, token_ids, kept)


def nucleus(
    scores: Tensor, weights: Tensor, totals: Tensor, all_params: list[ResolvedSamplingParams]
) -> tuple[Tensor, Tensor]:
    """Keeps the smallest likeliest set with probability >= top_p; returns also whether the columns contained it.

    A token stays while the sum of the likelier ones is below top_p times the total, so the first always stays.
    # [n, columns] float64, [n] bool
    """
    if all(params.top_p == 1 for params in all_params):
        return scores, torch.ones(len(all_params), dtype=torch.bool, device=scores.device)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    limits = per_row([params.top_p if params.top_p < 1 else math.inf for params in all_params], scores) * totals
    sums = row_sums(weights.gather(1, order))
    before = torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1]], dim=1)
    dropped = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, before >= limits)
    return scores.masked_fill(dropped, -math.inf), (sums[:, -1:] >= limits).squeeze(1)


def likeliest(values: Tensor, counts: list[int], host_copy: HostCopy | None = None) -> tuple[Tensor, Tensor]:
    """Returns exactly counts[row] likeliest tokens of each row, ties to the lowest id, ids ascending.

    Returns ids [n, columns] int64 padded with 0, and the used columns [n, columns] bool, the first of each row. Tokens
    at -inf complete a row in any order: they are outside every support.
    """
    width = values.shape[1]
    columns = min(max(counts), width)
    count = sent([min(c, width) for c in counts], values.device).unsqueeze(1)
    top = values.topk(min(columns + 1, width), dim=1)
    last = top.values.gather(1, count - 1)
    used = torch.arange(columns, device=values.device).unsqueeze(0) < count
    token_ids = top.indices[:, :columns].masked_fill(~used, width).sort(dim=1).values
    following = top.values.gather(1, count.clamp(max=top.values.shape[1] - 1))
    is_torn = ((last == following) & (last > -math.inf) & (count < width)).squeeze(1)
    if host_copy is not None and host_copy.assumes:
        host_copy.assume_none(is_torn)
    elif len(torn := is_torn.nonzero().squeeze(1)):
        token_ids[torn] = likeliest_among_ties(values[torn], last[torn], count[torn], columns)
    return token_ids.masked_fill(~used, 0), used


def likeliest_among_ties(values: Tensor, last: Tensor, count: Tensor, columns: int) -> Tensor:
    """`likeliest` for rows with ties across the limit, of which topk takes unspecified ones."""
    above, tied = values > last, values == last
    kept = above | (tied & (tied.cumsum(dim=1) <= count - above.sum(dim=1, keepdim=True)))
    ids = every_token_id(values).expand(values.shape).masked_fill(~kept, values.shape[1])
    return ids.sort(dim=1).values[:, :columns]
