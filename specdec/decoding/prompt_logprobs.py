"""Log-probabilities of a prompt's own tokens: the rows of a prompt, which no rule reads, to numbers.

They are the `logprobs` of verifications, from the raw logits by the same function, row by row: no chunk, neighbour or
cached prefix changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from specdec.decoding.host_copy import HostCopy, is_device, sent, with_one_host_copy
from specdec.decoding.logprobs import position_logprobs
from specdec.decoding.verification import CHUNK_ELEMENTS, CHUNK_ELEMENTS_CPU, VerificationRequest
from specdec.engine.readback import Readback
from specdec.protocol.types import PromptLogprobs, SamplerOutput


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Prompt tokens from index `first_index` on, each after a row of logits: row i is that before token i of these.
    `top_count`: the likeliest tokens wanted of each row."""

    first_index: int
    token_ids: Sequence[int]
    top_count: int

    def part(self, start: int, end: int) -> PromptRows:
        """Returns the tokens [start, end) of these."""
        return PromptRows(self.first_index + start, self.token_ids[start:end], self.top_count)


TargetWork: TypeAlias = VerificationRequest | PromptRows
TargetOutput: TypeAlias = SamplerOutput | PromptLogprobs
Verify = Callable[[Sequence[VerificationRequest], Sequence[int], Tensor, Readback | None], Sequence[SamplerOutput]]
Sample = Callable[[Sequence[TargetWork], Sequence[int], Tensor, Readback | None], Sequence[TargetOutput]]


def with_prompt_rows(verify: Verify) -> Sample:
    """Returns a sampler of verifications, which `verify` computes, and of prompt rows in the same step."""

    def sample(
        work: Sequence[TargetWork], row_counts: Sequence[int], logits: Tensor, readback: Readback | None = None
    ) -> Sequence[TargetOutput]:
        requests = [one for one in work if isinstance(one, VerificationRequest)]
        if len(requests) == len(work):
            return verify(requests, row_counts, logits, readback)
        parts = list(zip(work, row_counts, logits.split(list(row_counts))))
        rest = [(count, rows) for one, count, rows in parts if isinstance(one, VerificationRequest)]
        verified = (
            iter(verify(requests, [count for count, _ in rest], torch.cat([own for _, own in rest]), None))
            if rest
            else iter(())
        )
        return [prompt_logprobs(one, rows) if isinstance(one, PromptRows) else next(verified) for one, _, rows in parts]

    return sample


def prompt_logprobs(asked: PromptRows, logits: Tensor) -> PromptLogprobs:
    """Returns the log-probabilities of prompt tokens; the rank of each counts the tokens with a larger logit, and those
    of the same with a lower id.

    logits: [rows, vocabulary] float32, a row for each token.
    """
    if logits.shape[0] != len(asked.token_ids):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(asked.token_ids)} prompt tokens")
    limit = CHUNK_ELEMENTS if is_device(logits.device) else CHUNK_ELEMENTS_CPU
    size = max(1, limit // logits.shape[1])
    ends = [*accumulate(map(len, (groups := logits.split(size))))]
    found = PromptLogprobs(asked.first_index, asked.token_ids, [], [], [], [])
    for end, rows in zip(ends, groups):
        add_rows(found, asked.token_ids[end - len(rows) : end], rows, asked.top_count)
    return found


def add_rows(found: PromptLogprobs, token_ids: Sequence[int], logits: Tensor, top_count: int) -> None:
    """Appends the numbers of some rows to lists."""
    ids = sent(list(token_ids), logits.device, torch.int64).unsqueeze(1)

    def compute(host_copy: HostCopy) -> Callable[[], None]:
        own = logits.gather(1, ids)
        every_id = torch.arange(logits.shape[1], device=logits.device)
        before = (logits > own) | ((logits == own) & (every_id < ids))
        ranks, entries = host_copy.to_host(1 + before.sum(1)), position_logprobs(logits, ids, top_count, host_copy)

        def finish() -> None:
            found.ranks.extend(ranks())
            for (entry,) in entries():
                found.logprobs.append(entry.logprob)
                found.top_token_ids.extend(entry.top_token_ids)
                found.top_logprobs.extend(entry.top_logprobs)

        return finish

    with_one_host_copy(logits.device, compute)
