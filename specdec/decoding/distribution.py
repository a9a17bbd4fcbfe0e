"""The sampled law: from logits to the distribution tokens are drawn from.

Drafting, verification and plain decoding all go through `sampled_law` (temperature above 0) or `greedy_token_ids`
(GREEDY), so they cannot disagree about it. The order of its steps is part of the promise (docs/exactness.md):
edits (decoding/edits.py), temperature, min_p, top_k, top_p, each over what remains, ties broken to the lowest id.

A row's bits depend on its own logits and path only: every step is elementwise, a maximum, or a sum taken one token
after the other within the row. Sums over whole rows are never left to a reduction that may split them by the shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.decoding.crossing import Crossing, sent
from specdec.decoding.edits import PathContext, edited_logits
from specdec.protocol.types import Law

NUCLEUS_COLUMNS = (128, 1024, 8192, 32768)  # top_p looks among so many likeliest before it sorts the vocabulary
PRESUMED_NUCLEUS_COLUMNS = 1024  # where asking costs a wait: the median support under top_p is 3 to 14 tokens


@dataclass(frozen=True, slots=True)
class Support:
    """The law of some rows over their candidate tokens, ids ascending within a row.

    `scores` are log-probabilities up to a constant per row, the likeliest token at 0; -inf marks a column outside the
    support, among them padding columns, whose id is 0. Every row keeps at least one token.
    """

    rows: list[int]  # which rows of the call
    token_ids: Tensor | None  # [n, columns] int64; None when the columns are the whole vocabulary
    scores: Tensor  # [n, columns] float64

    @property
    def ids(self) -> Tensor:
        """The token id of every column, on one line when all rows share it.  # [n or 1, columns] int64"""
        return every_token_id(self.scores) if self.token_ids is None else self.token_ids

    def probabilities(self) -> Tensor:
        """The law itself; the total is a sum in id order.  # [n, columns] float64"""
        weights = self.scores.exp()
        return weights.div_(row_totals(weights))

    def columns_of(self, index: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """For pairs (index into `rows`, token id): the column, and whether the token has one there.  # [m], [m] bool"""
        if self.token_ids is None:
            columns = token_ids.clamp(max=self.scores.shape[1] - 1)
            return columns, columns == token_ids
        match = (self.token_ids[index] == token_ids.unsqueeze(1)) & (self.scores[index] > -math.inf)
        return match.to(torch.int8).argmax(dim=1), match.any(dim=1)

    def token_ids_at(self, columns: Tensor) -> Tensor:
        """The token ids of one column per row.  # [n] int64"""
        if self.token_ids is None:
            return columns
        return self.token_ids.gather(1, columns.unsqueeze(1)).squeeze(1)


WayToSupport = Callable[[Tensor, list[int], list[Law], Crossing | None], list[Support]]


def row_sums(values: Tensor) -> Tensor:
    """Running sums along each row of non-negative numbers, in id order.  # [n, columns] float64

    A CPU adds one element after the other whatever the shape. Other devices choose the order by the number of rows, so
    there the order is spelt out.
    """
    return values.cumsum(dim=1) if values.device.type == "cpu" else doubled_sums(values)


def doubled_sums(values: Tensor) -> Tensor:
    """Running sums by doubling: elementwise additions only, in an order that depends on the column alone.

    Sums of neighbours are rounded differently, so they are made to rise where a value is positive and nowhere else: a
    token without mass is never drawn. Columns of zeros at the end change nothing.  # [n, columns] float64
    """
    sums, reach = values, 1
    while reach < values.shape[1]:
        sums = torch.cat([sums[:, :reach], sums[:, reach:] + sums[:, :-reach]], dim=1)
        reach *= 2
    return torch.where(values > 0, sums, 0.0).cummax(dim=1).values


def row_totals(values: Tensor) -> Tensor:
    """The last running sum of each row: the sum of all of it.  # [n, 1] float64"""
    return row_sums(values)[:, -1:]


def greedy_token_ids(logits: Tensor, contexts: Sequence[PathContext]) -> Tensor:
    """The argmax of the edited logits, ties to the lowest id.  # [rows] int64"""
    return first_argmax(edited_logits(logits, contexts))


def first_argmax(values: Tensor) -> Tensor:
    """The lowest column that holds its row's maximum.  # [rows] int64"""
    return values.argmax(dim=1)  # torch documents that the first of several maxima is returned


def sampled_law(logits: Tensor, contexts: Sequence[PathContext], crossing: Crossing | None = None) -> list[Support]:
    """The sampled law of every row, for laws with a temperature.  logits: [rows, vocabulary] float32

    `contexts` cover the rows in order, `context.row_count` each. Rows come back in groups by how their support was
    found; which way that is depends on a row's own law and logits only. `crossing`: of the computation this is part of.
    """
    edited = edited_logits(logits, contexts)
    laws = [context.law for context in contexts for _ in range(context.row_count)]
    supports: list[Support] = []
    for find in (law_by_top_k, law_by_top_p, law_of_all):
        chosen = [row for row, law in enumerate(laws) if way_to_support(law, logits.shape[1]) is find]
        if chosen:
            supports += find(taken(edited, chosen), chosen, [laws[row] for row in chosen], crossing)
    return supports


def way_to_support(law: Law, width: int) -> WayToSupport:
    """The cheapest way to the support of a law over `width` tokens."""
    if 0 < law.top_k < width:
        return law_by_top_k
    return law_by_top_p if law.top_p < 1 else law_of_all


def dense_scores(logits: Tensor, contexts: Sequence[PathContext]) -> Tensor:
    """`sampled_law` in one tensor, -inf outside the support: for tests and tools.  # [rows, vocabulary] float64"""
    dense = torch.full(logits.shape, -math.inf, dtype=torch.float64, device=logits.device)
    for support in sampled_law(logits, contexts):
        inside = support.scores > -math.inf
        line, column = inside.nonzero(as_tuple=True)
        rows = sent(support.rows, logits.device)[line]
        dense[rows, support.ids.expand(inside.shape)[line, column]] = support.scores[line, column]
    return dense


def taken(values: Tensor, rows: list[int]) -> Tensor:
    """Those rows, which rise; without a copy when they are all rows."""
    return values if len(rows) == values.shape[0] else values[sent(rows, values.device)]


def in_row_order(parts: Sequence[tuple[list[int], Tensor]]) -> Tensor:
    """One number per row, given by groups of rows that together are all of them, by rising row.  # [rows]"""
    if len(parts) == 1:
        return parts[0][1]
    rows = [row for part, _ in parts for row in part]
    places = sorted(range(len(rows)), key=rows.__getitem__)
    values = torch.cat([values for _, values in parts])
    return values[sent(places, values.device)]


def every_token_id(values: Tensor) -> Tensor:
    """0 to vocabulary - 1 as one line.  # [1, vocabulary] int64"""
    return torch.arange(values.shape[1], device=values.device).unsqueeze(0)


def per_row(numbers: list[float], like: Tensor) -> Tensor:
    """A column of one number per row.  # [n, 1] float64"""
    return sent(numbers, like.device, torch.float64).unsqueeze(1)


def tempered(values: Tensor, maxima: Tensor, laws: list[Law]) -> Tensor:
    """(values - row maximum) / temperature: the maximum is subtracted first.  # [n, columns] float64"""
    shifted = values.to(torch.float64, copy=True).sub_(maxima)
    return shifted.div_(per_row([law.temperature for law in laws], values))


def without_improbable(tempered_scores: Tensor, laws: list[Law]) -> Tensor:
    """-inf, in place, where a token is less likely than min_p times the likeliest, whose score is 0.  # [n, columns]"""
    if all(law.min_p == 0 for law in laws):
        return tempered_scores
    limits = per_row([math.log(law.min_p) if law.min_p else -math.inf for law in laws], tempered_scores)
    return tempered_scores.masked_fill_(tempered_scores < limits, -math.inf)


def law_of_all(values: Tensor, rows: list[int], laws: list[Law], crossing: Crossing | None = None) -> list[Support]:
    """The law of rows with neither top_k nor top_p: every token min_p leaves."""
    scores = tempered(values, values.amax(dim=1, keepdim=True), laws)
    return [Support(rows, None, without_improbable(scores, laws))]


def law_by_top_k(values: Tensor, rows: list[int], laws: list[Law], crossing: Crossing | None) -> list[Support]:
    """The law of rows with top_k: only the k likeliest tokens of each are ever looked at again.

    min_p, which comes before top_k, may as well follow it: both keep the likeliest, and the shorter list is theirs.
    """
    token_ids, used = likeliest(values, [law.top_k for law in laws], crossing)
    raw = values.gather(1, token_ids).masked_fill_(~used, -math.inf)
    kept = without_improbable(tempered(raw, raw.amax(dim=1, keepdim=True), laws), laws)
    weights = kept.exp()
    return [Support(rows, token_ids, nucleus(kept, weights, row_totals(weights), laws)[0])]


def law_by_top_p(values: Tensor, rows: list[int], laws: list[Law], crossing: Crossing | None) -> list[Support]:
    """The law of rows with top_p alone: found among the likeliest tokens, or by sorting the vocabulary if need be."""
    scores = law_of_all(values, rows, laws)[0].scores
    totals = row_totals(scores.exp())
    if crossing is not None and crossing.is_blind:
        return [presumed_nucleus(scores, rows, totals, laws, crossing)]
    supports: list[Support] = []
    for columns in NUCLEUS_COLUMNS:
        if 4 * columns > values.shape[1] or not laws:
            break  # so many of so few are found no faster than all are sorted
        token_ids, _ = likeliest(scores, [columns] * len(laws))
        compact = scores.gather(1, token_ids)
        kept, enough = nucleus(compact, compact.exp(), totals, laws)
        was_found = enough.tolist()
        found = [index for index, is_found in enumerate(was_found) if is_found]
        missed = [index for index, is_found in enumerate(was_found) if not is_found]
        if found:
            supports.append(Support([rows[index] for index in found], taken(token_ids, found), taken(kept, found)))
        laws, rows = [laws[index] for index in missed], [rows[index] for index in missed]
        if missed:
            scores, totals = taken(scores, missed), taken(totals, missed)
    if laws:
        supports.append(Support(rows, None, nucleus(scores, scores.exp(), totals, laws)[0]))
    return supports


def presumed_nucleus(scores: Tensor, rows: list[int], totals: Tensor, laws: list[Law], crossing: Crossing) -> Support:
    """`law_by_top_p` without asking: the nucleus is presumed to be among so many likeliest tokens."""
    if 4 * PRESUMED_NUCLEUS_COLUMNS > scores.shape[1]:
        return Support(rows, None, nucleus(scores, scores.exp(), totals, laws)[0])
    token_ids, _ = likeliest(scores, [PRESUMED_NUCLEUS_COLUMNS] * len(laws), crossing)
    compact = scores.gather(1, token_ids)
    kept, enough = nucleus(compact, compact.exp(), totals, laws)
    crossing.presume_none(~enough)
    return Support(rows, token_ids, kept)


def nucleus(scores: Tensor, weights: Tensor, totals: Tensor, laws: list[Law]) -> tuple[Tensor, Tensor]:
    """Keeps the smallest likeliest set with probability >= top_p, and says whether the columns held enough for that.

    A token stays while the sum of the likelier ones is below top_p times the total, so the first always stays.
    # [n, columns] float64, [n] bool
    """
    if all(law.top_p == 1 for law in laws):
        return scores, torch.ones(len(laws), dtype=torch.bool, device=scores.device)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    limits = per_row([law.top_p if law.top_p < 1 else math.inf for law in laws], scores) * totals
    sums = row_sums(weights.gather(1, order))
    before = torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1]], dim=1)
    dropped = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, before >= limits)
    return scores.masked_fill(dropped, -math.inf), (sums[:, -1:] >= limits).squeeze(1)


def likeliest(values: Tensor, counts: list[int], crossing: Crossing | None = None) -> tuple[Tensor, Tensor]:
    """Exactly counts[row] likeliest tokens of each row, ties to the lowest id, ids ascending.

    Returns ids [n, columns] int64 padded with 0, and which columns are used [n, columns] bool, the first of each row.
    Tokens at -inf fill a row up in any order: they are outside every support.
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
    if crossing is not None and crossing.is_blind:
        crossing.presume_none(is_torn)
    elif len(torn := is_torn.nonzero().squeeze(1)):
        token_ids[torn] = likeliest_among_ties(values[torn], last[torn], count[torn], columns)
    return token_ids.masked_fill(~used, 0), used


def likeliest_among_ties(values: Tensor, last: Tensor, count: Tensor, columns: int) -> Tensor:
    """`likeliest` for rows whose ties reach over the border: topk does not say which of them it takes."""
    above, tied = values > last, values == last
    kept = above | (tied & (tied.cumsum(dim=1) <= count - above.sum(dim=1, keepdim=True)))
    ids = every_token_id(values).expand(values.shape).masked_fill(~kept, values.shape[1])
    return ids.sort(dim=1).values[:, :columns]
