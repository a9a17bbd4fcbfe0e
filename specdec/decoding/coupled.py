"""The target's token of every row under `COUPLED`: argmax(score + G) over the support, ties to the lowest id.

On a CPU with native kernels, rows that nothing but a temperature changes are decided by one call of these
(`engine.cpu.sampling`), all others by torch, to the same token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specdec.decoding.distribution import (
    Support,
    first_argmax,
    in_row_order,
    sampled_distribution,
    support_method,
    support_of_all,
    taken,
)
from specdec.decoding.host_copy import HostCopy
from specdec.decoding.logits_processors import PathContext
from specdec.decoding.noise import gumbel, gumbel_keys
from specdec.engine.cpu.sampling import UNDECIDED, kernels_for, race
from specdec.protocol.noise import Lane, stream_key


def coupled_token_ids(logits: Tensor, contexts: Sequence[PathContext], host_copy: HostCopy) -> Tensor:
    """Returns the token of each row, for any draft tokens. Rows and `host_copy`: see `sampled_distribution`.
    # [rows] int64"""
    native = kernels_for(logits)
    if native is None:
        return perturbed_token_ids(logits, contexts, host_copy)
    rows = [row_context(context, offset) for context in contexts for offset in range(context.row_count)]
    raced = [index for index, row in enumerate(rows) if is_only_tempered(row, logits.shape[1])]
    found = [UNDECIDED] * len(rows)
    if raced:
        keys = [stream_key(rows[index].params.seed, Lane.GUMBEL, rows[index].first_position) for index in raced]
        tokens = race(native, taken(logits, raced), keys, [rows[index].params.temperature for index in raced])
        for index, token_id in zip(raced, tokens):
            found[index] = token_id
    left = [index for index, token_id in enumerate(found) if token_id == UNDECIDED]
    if left:
        others = contexts if len(left) == len(rows) else [rows[index] for index in left]
        for index, token_id in zip(left, perturbed_token_ids(taken(logits, left), others, host_copy).tolist()):
            found[index] = token_id
    return torch.tensor(found)


def row_context(context: PathContext, offset: int) -> PathContext:
    """Returns the context of one of its rows."""
    first_row = context.first_row + offset
    drafted = context.draft_token_ids
    if first_row == len(drafted) == context.first_row:
        return context
    return PathContext(context.params, context.committed, drafted[:first_row], first_row)


def is_only_tempered(context: PathContext, width: int) -> bool:
    """Whether its scores are logits over temperature: without an edit, of all tokens."""
    params = context.params
    return params.min_p == 0 and support_method(params, width) is support_of_all and not context.is_edited


def perturbed_token_ids(logits: Tensor, contexts: Sequence[PathContext], host_copy: HostCopy) -> Tensor:
    """`coupled_token_ids` by torch, on any device."""
    supports = sampled_distribution(logits, contexts, host_copy)
    perturbed = perturbed_scores(supports, contexts, logits.device)
    return in_row_order([(support.rows, support.token_ids_at(first_argmax(scores))) for support, scores in perturbed])


def perturbed_scores(
    supports: list[Support], contexts: Sequence[PathContext], device: torch.device
) -> Iterator[tuple[Support, Tensor]]:
    """Yields each support with its scores plus the Gumbel noise of seed, position, token.  # [n, columns] float64"""
    seeds = [context.params.seed for context in contexts for _ in range(context.row_count)]
    positions = [context.first_position + offset for context in contexts for offset in range(context.row_count)]
    keys = gumbel_keys(seeds, positions, device)
    for support in supports:
        yield support, gumbel(taken(keys, support.rows), support.ids).add_(support.scores)
