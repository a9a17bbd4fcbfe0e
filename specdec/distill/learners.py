"""What `Trainer` trains: a draft's model, or heads on the target."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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

LOGITS_ROWS_MAX = 512  # at once: they take vocabulary x 4 bytes each, several times


def by_rows(function: Callable[[Labels, Tensor], Tensor], labels: Labels, rows: Tensor) -> Tensor:
    """Returns `function` of labels and hidden states, LOGITS_ROWS_MAX at once; backward computes each part again.

    function: makes logits and returns a value for each position; rows: [n, hidden]
    """
    parts = zip(*(whole.split(LOGITS_ROWS_MAX) for whole in (labels.own_ids, labels.log_probs, rows)))
    found = [
        checkpoint(lambda ids, probs, part: function(Labels(ids, probs), part), *part, use_reentrant=False)
        for part in parts
    ]
    return torch.cat(found)


class OutputLayer:
    """The logits of a model from its final hidden states; `own_size`: of its first tokens."""

    def __init__(self, model: transformers.PreTrainedModel, own_size: int, plan: Plan) -> None:
        self._layer = model.get_output_embeddings()
        self._scale, self._softcap = logit_scaling(model)
        self._own_size = own_size
        self._plan = plan

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [n, hidden] -> logits [n, own size] float32"""
        with torch.autocast(rows.device.type, dtype=torch.bfloat16, enabled=self._plan.bf16):
            logits = self._layer(rows)
        logits = logits[:, : self._own_size].float() * self._scale
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)


def final_states(model: Any, batch: Batch, plan: Plan) -> Tensor:
    """Returns the final hidden states of a batch, of an encoder-decoder model its decoder's.

    # [texts, length, hidden]
    """
    device = plan.device
    inputs = batch.inputs.to(device)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=plan.bf16):
        if batch.sources is None or batch.is_source is None:
            states: Tensor = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
            return states
        is_source = batch.is_source.to(device)
        encoded = model.encoder(input_ids=batch.sources.to(device), attention_mask=is_source).last_hidden_state
        seen = {"encoder_hidden_states": encoded, "encoder_attention_mask": is_source}
        states = model.decoder(input_ids=inputs, use_cache=False, **seen).last_hidden_state
    return states


def losses_of(plan: Plan, labels: Labels, logits: Tensor) -> Tensor:
    """Returns the plan's loss of each position, the mean over the temperatures.  # [n] float32"""
    pairs = [probabilities(labels, logits, temperature) for temperature in plan.temperatures]
    return torch.stack([LOSSES[plan.loss](*pair) for pair in pairs]).mean(0)


def rule_acceptances(
    labels: Labels, rows: Tensor, temperatures: Tensor, logits: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Returns acceptance by position under each rule at each temperature, such as "COUPLED 0.7".

    rows: [n, hidden], of which `logits` makes [n, tokens]; temperatures: [n] float32, of their texts
    """
    found = {}
    for temperature in temperatures.unique().tolist():
        at = temperatures == temperature
        own = Labels(labels.own_ids[at], labels.log_probs[at])
        if temperature == 0:
            rules: dict[str, Callable[[Labels, Tensor], Tensor]] = {"GREEDY": greedy_acceptance}
        else:
            rules = {
                "REJECTION": partial(rejection_acceptance, temperature=temperature),
                "COUPLED": partial(coupled_acceptance, temperature=temperature),
            }
        for name, rule in rules.items():
            found[f"{name} {temperature:g}"] = by_rows(partial(_accepted, rule, logits), own, rows[at])
    return found


def _accepted(
    rule: Callable[[Labels, Tensor], Tensor], logits: Callable[[Tensor], Tensor], labels: Labels, rows: Tensor
) -> Tensor:
    return rule(labels, logits(rows))


class DraftLearner:
    """A `Learner`: the model of a draft. `own_size`: its tokens that are proposed, without the one for all others."""

    def __init__(self, student: Any, own_size: int, plan: Plan) -> None:
        self.student = student.to(plan.device)
        self._logits = OutputLayer(self.student, own_size, plan)
        self._plan = plan

    def backward(self, batch: Batch) -> float:
        labels, rows = self._examples(batch)
        every = by_rows(self._losses, labels, rows)
        loss = self.chosen(batch, labels, every).mean()
        loss.backward()
        return loss.item()

    def chosen(self, batch: Batch, labels: Labels, losses: Tensor) -> Tensor:
        """Returns the losses of the positions that a step learns: here, of all.  # [chosen] float32

        labels, losses: of the learned positions of the batch, on the device
        """
        return losses

    def acceptances(self, batch: Batch) -> dict[str, Tensor]:
        """Returns acceptance by position, by rule and temperature of the text, such as "COUPLED 0.7"."""
        labels, rows = self._examples(batch)
        return rule_acceptances(labels, rows, batch.temperatures.to(rows.device), self._logits)

    def _losses(self, labels: Labels, rows: Tensor) -> Tensor:
        return losses_of(self._plan, labels, self._logits(rows))

    def _examples(self, batch: Batch) -> tuple[Labels, Tensor]:
        """Returns labels on the device, and final hidden states [n, hidden], of the learned positions."""
        device = self._plan.device
        states = final_states(self.student, batch, self._plan)
        labels = Labels(batch.labels.own_ids.to(device), batch.labels.log_probs.to(device))
        return labels, states[batch.learned.to(device)]


class HeadsLearner:
    """A `Learner`: heads on a target (Medusa-1, Cai et al. 2024, section 2.2: the target is frozen).

    Head h = 1, 2, ... learns from the hidden state of position i the target's distribution after position i + h. Heads
    share nothing, so each head's gradients are added before the next head's logits are made.
    """

    def __init__(self, target: transformers.PreTrainedModel, head_count: int, own_size: int, plan: Plan) -> None:
        self._target = target.eval().requires_grad_(False).to(plan.device)
        self._output = OutputLayer(self._target, own_size, plan)
        self._plan = plan
        self.student = Heads(head_count, target.get_output_embeddings().weight.shape[1]).to(plan.device)

    def backward(self, batch: Batch) -> float:
        hidden, total = self._hidden(batch), 0.0
        for index in range(self.student.head_count):
            labels, _, rows = self._examples(batch, hidden, index + 1)
            every = by_rows(partial(self._losses, index), labels, rows)
            loss = every.mean() / self.student.head_count
            loss.backward()
            total += loss.item()
        return total

    def acceptances(self, batch: Batch) -> dict[str, Tensor]:
        """Returns acceptance of the heads' likeliest tokens, by head and temperature of the text, such as
        "head 1 at 0.7", given that the tokens before were accepted."""
        hidden, found = self._hidden(batch), {}
        for index in range(self.student.head_count):
            labels, temperatures, rows = self._examples(batch, hidden, index + 1)
            token_ids = by_rows(partial(self._likeliest, index), labels, rows)
            for temperature in temperatures.unique().tolist():
                at = temperatures == temperature
                own = Labels(labels.own_ids[at], labels.log_probs[at])
                found[f"head {index + 1} at {temperature:g}"] = certain_acceptance(own, token_ids[at], temperature)
        return found

    @torch.no_grad()
    def _hidden(self, batch: Batch) -> Tensor:
        """Returns the target's final hidden states.  # [texts, length, hidden] float32"""
        return final_states(self._target, batch, self._plan).float()

    def _examples(self, batch: Batch, hidden: Tensor, distance: int) -> tuple[Labels, Tensor, Tensor]:
        """Returns labels, temperatures, and hidden states of the positions `distance` before them in the same text."""
        text, position = batch.learned.nonzero(as_tuple=True)
        has_source = position >= distance
        has_source &= batch.learned[text, (position - distance).clamp_min(0)]
        device = hidden.device
        text, position = text[has_source].to(device), position[has_source].to(device)
        labels = Labels(batch.labels.own_ids[has_source].to(device), batch.labels.log_probs[has_source].to(device))
        return labels, batch.temperatures[has_source].to(device), hidden[text, position - distance]

    def _losses(self, index: int, labels: Labels, rows: Tensor) -> Tensor:
        return losses_of(self._plan, labels, self._logits(index, rows))

    def _likeliest(self, index: int, labels: Labels, rows: Tensor) -> Tensor:
        return self._logits(index, rows).argmax(1)

    def _logits(self, index: int, rows: Tensor) -> Tensor:
        """Returns the logits of one head.  # [n, own size] float32"""
        with torch.autocast(rows.device.type, dtype=torch.bfloat16, enabled=self._plan.bf16):
            inputs = self.student.of(index, rows)
        return self._output(inputs)
