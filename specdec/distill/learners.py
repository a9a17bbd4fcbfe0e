"""What `Trainer` trains: a draft's model, or heads on the target."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from specdec.distill.losses import (
    LOSSES,
    Labels,
    certain_acceptance,
    coupled_acceptance,
    greedy_acceptance,
    probabilities,
    rejection_acceptance,
)
from specdec.distill.training import Batch, Plan
from specdec.engine.heads import Heads
from specdec.engine.transformers_model import logit_scaling


def losses_of(plan: Plan, labels: Labels, logits: Tensor) -> Tensor:
    """Returns the plan's loss of each position, the mean over the temperatures.  # [n] float32"""
    pairs = [probabilities(labels, logits, temperature) for temperature in plan.temperatures]
    return torch.stack([LOSSES[plan.loss](*pair) for pair in pairs]).mean(0)


class DraftLearner:
    """A `Learner`: the model of a draft. `own_size`: its tokens that are proposed, without the one for all others."""

    def __init__(self, student: Any, own_size: int, plan: Plan) -> None:
        self.student = student.to(plan.device)
        self._own_size = own_size
        self._plan = plan

    def backward(self, batch: Batch) -> float:
        loss = self.losses(batch, *self._logits(batch)).mean()
        loss.backward()
        return loss.item()

    def losses(self, batch: Batch, labels: Labels, logits: Tensor) -> Tensor:
        """Returns the loss of each position that a step learns: here, of all.  # [n] float32

        labels, logits: of the learned positions of the batch, on the device
        """
        return losses_of(self._plan, labels, logits)

    def acceptances(self, batch: Batch) -> dict[str, Tensor]:
        """Returns acceptance by position, by rule and temperature of the text, such as "COUPLED 0.7"."""
        found = {}
        labels, logits = self._logits(batch)
        temperatures = batch.temperatures.to(logits.device)
        for temperature in temperatures.unique().tolist():
            at = temperatures == temperature
            own, rows = Labels(labels.own_ids[at], labels.log_probs[at]), logits[at]
            if temperature == 0:
                found["GREEDY 0"] = greedy_acceptance(own, rows)
                continue
            found[f"REJECTION {temperature:g}"] = rejection_acceptance(own, rows, temperature)
            found[f"COUPLED {temperature:g}"] = coupled_acceptance(own, rows, temperature)
        return found

    def _logits(self, batch: Batch) -> tuple[Labels, Tensor]:
        """Returns the labels on the device, and the student's logits at the learned positions."""
        device = self._plan.device
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=self._plan.bf16):
            every = self.student(input_ids=batch.inputs.to(device), use_cache=False).logits
        logits = every[batch.learned.to(device)][:, : self._own_size].float()
        return Labels(batch.labels.own_ids.to(device), batch.labels.log_probs.to(device)), logits


class HeadsLearner:
    """A `Learner`: heads on a target (Medusa-1, Cai et al. 2024, section 2.2: the target is frozen).

    Head h = 1, 2, ... learns from the hidden state of position i the target's distribution after position i + h. Heads
    share nothing, so each head's gradients are added before the next head's logits are made.
    """

    def __init__(self, target: transformers.PreTrainedModel, head_count: int, own_size: int, plan: Plan) -> None:
        self._target = target.eval().requires_grad_(False).to(plan.device)
        self._output = target.get_output_embeddings()
        self._scale, self._softcap = logit_scaling(target)
        self._own_size = own_size
        self._plan = plan
        self.student = Heads(head_count, self._output.weight.shape[1]).to(plan.device)

    def backward(self, batch: Batch) -> float:
        hidden, total = self._hidden(batch), 0.0
        for index in range(self.student.head_count):
            labels, _, rows = self._examples(batch, hidden, index + 1)
            loss = losses_of(self._plan, labels, self._logits(index, rows)).mean() / self.student.head_count
            loss.backward()
            total += loss.item()
        return total

    def acceptances(self, batch: Batch) -> dict[str, Tensor]:
        """Returns acceptance of the heads' likeliest tokens, by head and temperature of the text, such as
        "head 1 at 0.7", given that the tokens before were accepted."""
        hidden, found = self._hidden(batch), {}
        for index in range(self.student.head_count):
            labels, temperatures, rows = self._examples(batch, hidden, index + 1)
            token_ids = self._logits(index, rows).argmax(1)
            for temperature in temperatures.unique().tolist():
                at = temperatures == temperature
                own = Labels(labels.own_ids[at], labels.log_probs[at])
                found[f"head {index + 1} at {temperature:g}"] = certain_acceptance(own, token_ids[at], temperature)
        return found

    @torch.no_grad()
    def _hidden(self, batch: Batch) -> Tensor:
        """Returns the target's final hidden states.  # [texts, length, hidden] float32"""
        device = self._plan.device
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=self._plan.bf16):
            base = self._target.base_model(input_ids=batch.inputs.to(device), use_cache=False)
        hidden: Tensor = base.last_hidden_state.float()
        return hidden

    def _examples(self, batch: Batch, hidden: Tensor, distance: int) -> tuple[Labels, Tensor, Tensor]:
        """Returns labels, temperatures, and hidden states of the positions `distance` before them in the same text."""
        text, position = batch.learned.nonzero(as_tuple=True)
        has_source = position >= distance
        has_source &= batch.learned[text, (position - distance).clamp_min(0)]
        device = hidden.device
        text, position = text[has_source].to(device), position[has_source].to(device)
        labels = Labels(batch.labels.own_ids[has_source].to(device), batch.labels.log_probs[has_source].to(device))
        return labels, batch.temperatures[has_source].to(device), hidden[text, position - distance]

    def _logits(self, index: int, rows: Tensor) -> Tensor:
        """Returns the logits of one head.  # [n, own size] float32"""
        with torch.autocast(rows.device.type, dtype=torch.bfloat16, enabled=self._plan.bf16):
            logits = self._output(self.student.of(index, rows))
        logits = logits[:, : self._own_size].float() * self._scale
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)
