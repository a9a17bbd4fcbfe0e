"""Heads on the target: their proposals for the verifications that want them, beside the sampler output.

They decide no text, so their numbers need no stable bits; nothing is computed for a step without such a verification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specdec.config import HeadSettings
from specdec.decoding.prompt_logprobs import TargetOutput, TargetWork
from specdec.decoding.verification import VerificationRequest
from specdec.engine.heads import Heads, load_heads
from specdec.engine.interface import CausalModel, HiddenStates
from specdec.errors import ConfigError
from specdec.folders import expanded
from specdec.protocol.heads import HEAD_CANDIDATES, HEAD_CONFIDENCE_MAX, HeadProposals
from specdec.protocol.rejection import conclude
from specdec.protocol.types import SamplerOutput

NO_HEADS = "none"


def load_head_proposer(model: CausalModel, settings: HeadSettings) -> tuple[HeadProposer | None, int]:
    """Returns the proposer of the heads in the settings' folder and their number; None and 0 without. Raises
    ConfigError for a model without hidden states, ModelRefused for heads that do not belong to the model."""
    if settings.heads == NO_HEADS:
        return None, 0
    if not isinstance(model, HiddenStates):
        name = model.description.model_name
        raise ConfigError(f"--heads is {settings.heads}; {name} has no hidden states, so it must be {NO_HEADS}")
    folder = expanded(settings.heads)
    heads = load_heads(folder, model.description.model_digest, model.hidden_size)
    return HeadProposer(heads, model.return_hidden()), heads.head_count


def last_rows(requests: Sequence[TargetWork], outputs: Sequence[TargetOutput]) -> dict[int, int]:
    """Returns the row after the last accepted token of each verification that wants heads, by its index: what the round
    commits ends with that row's own token, so the other rows' heads are of no use."""
    return {
        index: conclude(request.params, request, output).last_row
        for index, (request, output) in enumerate(zip(requests, outputs))
        if isinstance(request, VerificationRequest) and isinstance(output, SamplerOutput) and request.wants_heads
    }


class HeadProposer:
    """Adds proposals to sampler outputs. `output`: the target's output layer, [rows, hidden] -> [rows, vocab]."""

    def __init__(self, heads: Heads, output: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._heads = heads
        self._output = output

    def __call__(
        self,
        requests: Sequence[TargetWork],
        hidden: Sequence[torch.Tensor],
        outputs: Sequence[TargetOutput],
    ) -> Sequence[TargetOutput]:
        """Returns the outputs, those of requests that want heads with proposals. hidden: of each request's rows."""
        rows = last_rows(requests, outputs)
        if not rows:
            return outputs
        token_ids, confidences = self.propose(torch.stack([hidden[index][row] for index, row in rows.items()]))
        found, size = list(outputs), self._heads.head_count * HEAD_CANDIDATES
        for place, index in enumerate(rows):
            own = slice(place * size, (place + 1) * size)
            proposals = HeadProposals(tuple(token_ids[own]), bytes(confidences[own]))
            own_output = outputs[index]
            assert isinstance(own_output, SamplerOutput)
            found[index] = own_output._replace(head_proposals=proposals)
        return found

    def propose(self, hidden: torch.Tensor) -> tuple[list[int], list[int]]:
        """Returns token ids and confidences, each [rows, heads, HEAD_CANDIDATES] in row-major order.

        hidden: [rows, hidden], of the model's type.
        """
        if self._heads.weight.device != hidden.device:
            self._heads.to(hidden.device)
        inputs = self._heads(hidden.float()).flatten(0, 1).to(hidden.dtype)
        logits = self._output(inputs)  # [rows * heads, vocab] float32
        values, token_ids = logits.topk(HEAD_CANDIDATES)
        probabilities = (values - logits.logsumexp(1, keepdim=True)).exp()
        confidences = (probabilities * HEAD_CONFIDENCE_MAX).nan_to_num().clamp(0, HEAD_CONFIDENCE_MAX).long()
        both = torch.stack([token_ids, confidences]).flatten(1).tolist()  # one copy to the host
        return both[0], both[1]
