"""Heads on the target: their proposals for the verifications that want them, beside the sampler output.

They decide no text, so their numbers need no stable bits; nothing is computed for a step without such a verification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specdec.config import TargetSettings
from specdec.decoding.prompt_logprobs import TargetOutput, TargetWork
from specdec.decoding.verification import VerificationRequest
from specdec.engine.eagle.folder import is_eagle, load_eagle, target_facts
from specdec.engine.eagle.model import EagleTarget
from specdec.engine.heads import Heads, load_heads
from specdec.engine.interface import CausalModel, Chunk, Features, HiddenStates
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import ConfigError
from specdec.folders import expanded
from specdec.protocol.heads import HEAD_CANDIDATES, HEAD_CONFIDENCE_MAX, HEAD_PASSES_MAX, HeadProposals
from specdec.protocol.rejection import conclude
from specdec.protocol.types import SamplerOutput
from specdec.replica.loading import HiddenReading
from specdec.target_service.feature_head import FeatureHeadDrafter

NO_HEADS = "none"


def load_head_proposer(model: CausalModel, settings: TargetSettings) -> HiddenReading[TargetWork, TargetOutput]:
    """Returns the proposer of the heads in the settings' folder, of either kind, and the model with what they need;
    nothing without. Raises ConfigError for a model without hidden states, ModelRefused for heads that do not belong to
    the model."""
    if settings.heads == NO_HEADS:
        return HiddenReading(model)
    if not isinstance(model, HiddenStates) or not isinstance(model, Features):
        name = model.description.model_name
        raise ConfigError(f"--heads is {settings.heads}; {name} has no hidden states, so it must be {NO_HEADS}")
    folder = expanded(settings.heads)
    if is_eagle(folder):
        head = load_eagle(folder, target_facts(open_model_folder(settings.model)))
        with_head = EagleTarget(model, head)
        drafter = FeatureHeadDrafter(with_head)
        return HiddenReading(with_head, drafter, head_passes_max=HEAD_PASSES_MAX, measure_passes=drafter.measure_passes)
    heads = load_heads(folder, model.description.model_digest, model.hidden_size)
    return HiddenReading(model, HeadProposer(heads, model.return_hidden()), heads.head_count)


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
        chunks: Sequence[Chunk],
        hidden: Sequence[torch.Tensor | None],
        outputs: Sequence[TargetOutput],
    ) -> Sequence[TargetOutput]:
        """Returns the outputs, those of requests that want heads with proposals. hidden: of each request's rows."""
        rows = last_rows(requests, outputs)
        if not rows:
            return outputs
        own_hidden = [(hidden[index], row) for index, row in rows.items()]
        token_ids, confidences = self.propose(torch.stack([own[row] for own, row in own_hidden if own is not None]))
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
