"""An EAGLE-3 head as a `Learner`: training-time test (Li et al. 2025, arXiv 2503.01840, section 3.2).

In step j = 0, 1, ... the head reads at every position its own x of the step before in place of the target's feature,
beside the true token, and learns the target's distribution one position later. So a step sees what it will see when it
drafts: the target's features up to j positions before its own, and behind them its own.

Beside the distribution a new head learns to be, with its x, the feature of the last layer, as in EAGLE (Li et al. 2024,
arXiv 2401.15077, section 4.2). EAGLE-3 leaves that out, as it limits what a head learns from much text; with a million
tokens it learns sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention, smooth_l1_loss

from specdec.distill.learners import LOGITS_ROWS_MAX, losses_of, rule_acceptances
from specdec.distill.losses import Labels
from specdec.distill.training import Batch, Plan
from specdec.engine.eagle.config_check import FEATURE_LAYERS_MAX, POSITIONS, THETA, TargetFacts
from specdec.engine.eagle.features import final_norm_of, gain_of
from specdec.engine.eagle.folder import target_facts
from specdec.engine.eagle.network import EagleConfig, EagleHead, Projections, default_layers
from specdec.engine.loading.model_folder import ModelFolder
from specdec.engine.transformers_model import logit_scaling
from specdec.errors import ConfigError

STEP_WEIGHT = 0.8  # of a step's loss, relative to the step before, as in the paper's code
FEATURE_WEIGHT = 1.0  # of the loss of features, the mean of their numbers in size 1, beside that of distributions
NORM_EPSILON = 1e-5
OTHER_FEATURES = 0.1  # share of what a new head does not begin with
ACTIVATION = "silu"  # the only one that vLLM's heads have


def feature_layers(folder: ModelFolder, asked: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the layers whose inputs a head on the target in `folder` reads; `asked`: empty for the default ones.
    Raises ConfigError."""
    count = target_facts(folder).layer_count
    is_ascending = all(first < second for first, second in zip(asked, asked[1:]))
    if not is_ascending or len(asked) > FEATURE_LAYERS_MAX or (asked and asked[-1] > count):
        limit = f"it must name at most {FEATURE_LAYERS_MAX} of 0 to {count}, ascending"
        raise ConfigError(f"--eagle-layers is {list(asked)}; {limit}")
    return asked or default_layers(count)


def head_sizes(target: Any, facts: TargetFacts, layer_ids: tuple[int, ...], token_count: int) -> EagleConfig:
    """Returns the sizes of a head like a layer of the target, of which `target` is the configuration."""
    heads = target.num_attention_heads
    head_size = getattr(target, "head_dim", None) or target.hidden_size // heads
    wide = getattr(target, "intermediate_size", None) or getattr(target, "n_inner", None) or 4 * target.hidden_size
    rope = getattr(target, "rope_parameters", None) or {}
    return EagleConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        aux_layer_ids=layer_ids,
        head_count=heads,
        kv_head_count=getattr(target, "num_key_value_heads", None) or heads,
        head_size=head_size + head_size % 2,
        intermediate_size=wide,
        activation=ACTIVATION,
        norm_epsilon=NORM_EPSILON,
        rope_theta=float(rope.get("rope_theta", THETA)),
        vocabulary_size=facts.vocabulary_size,
        draft_vocabulary_size=token_count,
        norm_before_residual=False,
        positions_max=getattr(target, "max_position_embeddings", POSITIONS),
    )


@torch.no_grad()
def new_head(model: Any, config: EagleConfig, target_ids: Tensor, sizes: Sequence[float], seed: int) -> EagleHead:
    """Returns a head on a target that learns fast. Its output layer and the norm before it are the target's. The
    reduced feature is that of the last layer, and of size 1: the layer's own results, of that size too, then count
    beside it. Attention looks for the embedding of its own token, as queries and keys of a head are made of it by one
    random projection, so that at first a row reads its token and not the mean of all.

    target_ids: [draft vocabulary] int64; sizes: of the features of each layer, see `feature_sizes`
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = EagleHead(config, target_ids)
        projections = torch.randn(config.kv_head_count, config.head_size, config.hidden_size) / config.hidden_size**0.5
        mixed = torch.randn(config.hidden_size, len(sizes), config.target_hidden_size)
    scale, _ = logit_scaling(model)
    output = model.get_output_embeddings().weight.detach().float().cpu()
    head.lm_head.weight.copy_(output[target_ids] * scale)
    head.norm.weight.copy_(gain_of(final_norm_of(model.base_model), config.hidden_size))
    mixed *= OTHER_FEATURES / config.target_hidden_size**0.5
    mixed[:, -1] += torch.eye(config.hidden_size)
    head.fc.weight.copy_((mixed / torch.tensor(sizes)[:, None]).flatten(1))
    attention = head.layer.self_attn
    for part in (attention.q_proj, attention.k_proj):
        part.weight.mul_(OTHER_FEATURES)
        heads = part.weight.unflatten(0, (config.kv_head_count, -1, config.head_size))
        heads[..., : config.hidden_size] = projections[:, None]
    return head


def draft_ids_of(target_ids: Tensor, size: int) -> Tensor:
    """Returns the draft's id of each of the target's, -1 for others.  # [size] int64"""
    ids = torch.full((size,), -1)
    ids[target_ids] = torch.arange(len(target_ids))
    return ids


class EagleLearner:
    """A `Learner`: a head. `embeddings`: the target's, [vocabulary, hidden]; `steps`: of the training-time test;
    `feature_size`: of the last layer's features, if x is to learn them in size 1. Batches have features."""

    def __init__(
        self, head: EagleHead, embeddings: Tensor, steps: int, plan: Plan, feature_size: float | None = None
    ) -> None:
        self.head = head.to(plan.device)
        self._embeddings = embeddings.to(plan.device)
        self._draft_ids = draft_ids_of(head.target_ids.cpu(), head.config.vocabulary_size)
        self._steps = steps
        self._plan = plan
        self._feature_size = feature_size

    @property
    def student(self) -> nn.Module:
        """The head."""
        return self.head

    def backward(self, batch: Batch) -> float:
        """Each step's logits are made, and their gradients added, part by part: of all steps together they would take
        the batch's tokens times the vocabulary, several times over."""
        states = self.states(batch)
        weights = [STEP_WEIGHT**step for step in range(len(states))]
        total, gradients = 0.0, []
        for step, (x, weight) in enumerate(zip(states, weights)):
            held = x.detach().requires_grad_()
            labels, text, position = self._examples(batch, step)
            share = weight / sum(weights) / max(1, len(text))
            parts = (labels.own_ids, labels.log_probs, text, position)
            for ids, log_probs, texts, positions in zip(*(part.split(LOGITS_ROWS_MAX) for part in parts)):
                rows = held[texts, positions]
                losses = losses_of(self._plan, Labels(ids, log_probs), self._logits(rows))
                losses = losses + self._feature_losses(batch, rows, texts, positions + 1 + step)
                loss = losses.sum() * share
                loss.backward()
                total += loss.item()
            gradients.append(torch.zeros_like(x) if held.grad is None else held.grad)
        torch.autograd.backward(states, gradients)
        return total

    def acceptances(self, batch: Batch) -> dict[str, Tensor]:
        """Returns acceptance by rule, temperature of the text and position of the draft token, such as
        "COUPLED 0.7 position 2", given that the tokens before it were accepted."""
        found: dict[str, Tensor] = {}
        for step, x in enumerate(self.states(batch)):
            labels, text, position = self._examples(batch, step)
            temperatures = self._temperatures(batch, step)
            own = rule_acceptances(labels, x[text, position], temperatures, self._logits)
            found |= {f"{name} position {step + 1}": values for name, values in own.items()}
        return found

    def states(self, batch: Batch) -> list[Tensor]:
        """Returns x of every step. Row s of step j is that of the pair whose token is token s + 1 + j of its text: it
        predicts the one after.  # [texts, length - 1 - j, hidden] float32 each"""
        head, device = self.head, self._plan.device
        assert batch.features is not None
        inputs = batch.inputs.to(device)
        length, found = inputs.shape[1], list[Tensor]()
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=self._plan.bf16):
            embedded = embedding(inputs, self._embeddings).float()
            x = head.fc(batch.features[:, :-1].to(device).float()).float()
            made: list[Projections] = []
            for step in range(min(self._steps, length - 1)):
                count = length - 1 - step
                positions = torch.arange(step, step + count, device=device)
                made.append(head.project(x[:, :count], embedded[:, 1 + step :], positions))
                x = head.finish(made[-1].residual, attend(made)).float()
                found.append(x)
        return found

    def _examples(self, batch: Batch, step: int) -> tuple[Labels, Tensor, Tensor]:
        """Returns the labels that a step learns, on the device, with the text and the row of each."""
        text, position = batch.learned.nonzero(as_tuple=True)
        has_row, device = position > step, self._plan.device
        ids = batch.labels.own_ids[has_row]
        ids = torch.where(ids >= 0, self._draft_ids[ids.clamp_min(0)], -1)
        labels = Labels(ids.to(device), batch.labels.log_probs[has_row].to(device))
        return labels, text[has_row].to(device), (position[has_row] - 1 - step).to(device)

    def _feature_losses(self, batch: Batch, x: Tensor, text: Tensor, position: Tensor) -> Tensor:
        """Returns the weighted smooth L1 between rows of x and the features of these tokens.  # [n] float32"""
        if self._feature_size is None:
            return x.new_zeros(len(x))
        assert batch.features is not None
        wanted = batch.features[text.cpu(), position.cpu(), -x.shape[1] :].to(x.device).float() / self._feature_size
        return FEATURE_WEIGHT * smooth_l1_loss(x, wanted, reduction="none").mean(1)

    def _temperatures(self, batch: Batch, step: int) -> Tensor:
        _, position = batch.learned.nonzero(as_tuple=True)
        return batch.temperatures[position > step].to(self._plan.device)

    def _logits(self, rows: Tensor) -> Tensor:
        """[n, hidden] -> [n, draft vocabulary] float32"""
        with torch.autocast(rows.device.type, dtype=torch.bfloat16, enabled=self._plan.bf16):
            return self.head.logits(rows).float()


def attend(steps: Sequence[Projections]) -> Tensor:
    """Returns the results of attention of the last step's rows: row s attends to the first step's rows up to s, and to
    the later steps' rows s, its own among them.  # [texts, heads, n, head size]"""
    first, last = steps[0], steps[-1]
    if len(steps) == 1:
        return scaled_dot_product_attention(first.queries, first.keys, first.values, is_causal=True, enable_gqa=True)
    count, kv_heads = last.queries.shape[2], last.keys.shape[1]
    queries = last.queries.unflatten(1, (kv_heads, -1)) * last.queries.shape[-1] ** -0.5
    later = [(own.keys[:, :, None, :count], own.values[:, :, None, :count]) for own in steps[1:]]
    keys, values = first.keys[:, :, None, :count], first.values[:, :, None, :count]
    is_later = torch.ones(count, count, dtype=torch.bool, device=queries.device).triu(1)
    scores = (queries @ keys.transpose(-2, -1)).masked_fill(is_later, -torch.inf)
    own_scores = torch.stack([(queries * key).sum(-1) for key, _ in later], -1)
    shares = torch.cat([scores, own_scores], -1).float().softmax(-1).to(values.dtype)
    found = shares[..., :count] @ values
    for index, (_, value) in enumerate(later):
        found = found + shares[..., count + index, None] * value
    return found.flatten(1, 2)
