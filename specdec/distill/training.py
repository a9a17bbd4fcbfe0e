"""The training of a student: batches, schedule, checkpoints, held-out acceptance, and the end.

Everything that is random comes from the seed, the epoch and the step alone, so a run continues from a checkpoint as if
it had not stopped, bit for bit on one machine with the same libraries and threads, unless its budget is in minutes.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.distill.losses import Labels
from specdec.distill.texts import LabelledTexts
from specdec.errors import ConfigError

POOL_BATCHES = 32  # sorted by length together, so that texts of a batch are about as long
ADAM_BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
WARMUP_SHARE = 0.03  # of the run, in which the learning rate rises from 0
LEARNING_RATE_LAST = 0.1  # share of the peak at the end of the cosine
GRADIENT_NORM_MAX = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a run. Exactly one of `token_budget` and `minutes` is above 0. `patience`: evaluations in a row
    without a better acceptance, after which it ends."""

    loss: str
    temperatures: tuple[float, ...]
    learning_rate: float
    batch_tokens: int
    token_budget: int
    minutes: float
    evaluate_tokens: int
    patience: int
    seed: int
    device: str
    bf16: bool
    settings: str  # a checkpoint is continued with the same only, and the same texts
    texts: str


@dataclass(slots=True)
class Progress:
    """What a checkpoint holds beside weights and optimiser."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # of the epoch
    tokens: int = 0
    seconds: float = 0.0
    best: float = 0.0  # held-out acceptance, mean over its names
    unimproved: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts side by side, shorter ones filled up; the learned positions and their labels; of an encoder-decoder model
    also the encoder's inputs; for a head that reads them the target's features."""

    inputs: Tensor  # [texts, length] int64, the student's ids
    learned: Tensor  # [texts, length] bool
    labels: Labels
    temperatures: Tensor  # [learned positions] float32, of their texts; at most 1: labels say nothing above
    sources: Tensor | None = None  # [texts, input length] int64, the student's ids
    is_source: Tensor | None = None  # [texts, input length] bool
    features: Tensor | None = None  # [texts, length, features] bfloat16

    @property
    def token_count(self) -> int:
        return int(self.learned.sum())


class TokenRows(Protocol):
    """Rows of numbers, one for each token of texts one after another."""

    def rows(self, start: int, end: int) -> Tensor:
        """Returns those of the tokens [start, end) of one text."""


class Data:
    """Labelled texts in the student's ids. `begins`: [texts], the first position of each that counts. `own_ids`:
    [target's ids] int64, the student's id of each; None: the same. `unknown`: the id that stands for all others, which
    has no label. `features`: the target's along the texts, for a student that reads them."""

    def __init__(
        self,
        texts: LabelledTexts,
        begins: Tensor,
        own_ids: Tensor | None,
        unknown: int = -1,
        features: TokenRows | None = None,
    ) -> None:
        self.texts = texts
        self._begins = begins.tolist()
        self._starts = [0, *texts.lengths.cumsum(0).tolist()]
        self._own_ids, self._unknown = own_ids, unknown
        self._sources = texts.inputs
        self._features = features

    def _own(self, ids: Tensor) -> Tensor:
        """Returns the student's ids of the target's.  # int64"""
        return ids.long() if self._own_ids is None else self._own_ids[ids.long()]

    def batch(self, indices: Sequence[int]) -> Batch:
        """Returns these texts as one batch."""
        texts, count = self.texts, int(self.texts.lengths[list(indices)].max())
        inputs = torch.zeros(len(indices), count, dtype=torch.int64)
        learned = torch.zeros(len(indices), count, dtype=torch.bool)
        chosen, temperatures = [], []
        for row, index in enumerate(indices):
            start, end, begin = self._starts[index], self._starts[index + 1], self._begins[index]
            inputs[row, : end - start] = self._own(texts.token_ids[start:end])
            learned[row, begin : end - start] = True
            chosen.append(torch.arange(start + begin, end))
            temperatures.append(texts.temperatures[index].clamp_max(1).expand(len(chosen[-1])))
        at = torch.cat(chosen)
        likeliest = self._own(texts.likeliest_ids[at])
        labels = Labels(likeliest.where(likeliest != self._unknown, -1), texts.log_probs[at].float())
        sources = padded([self._own(self._sources[index]) for index in indices]) if self._sources else (None, None)
        features = self._features_of(indices)
        return Batch(inputs, learned, labels, torch.cat(temperatures), sources[0], sources[1], features)

    def _features_of(self, indices: Sequence[int]) -> Tensor | None:
        """Returns the features of texts side by side, shorter ones filled up with zeros."""
        if self._features is None:
            return None
        rows = [self._features.rows(self._starts[index], self._starts[index + 1]) for index in indices]
        return pad_sequence(rows, batch_first=True)

    def epoch(self, seed: int, epoch: int, batch_tokens: int) -> list[list[int]]:
        """Returns the batches of an epoch, as indices of texts: the same for the same seed and epoch."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        lengths = self.texts.lengths.tolist()
        order = torch.randperm(len(lengths), generator=generator).tolist()
        mean = sum(lengths) / len(lengths)
        pool = max(1, int(POOL_BATCHES * batch_tokens / mean))
        batches: list[list[int]] = []
        for first in range(0, len(order), pool):
            batches += packed(sorted(order[first : first + pool], key=lengths.__getitem__), lengths, batch_tokens)
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[index] for index in shuffled]


def padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns rows side by side, shorter ones filled up, and where they are.  # [rows, length] int64, bool"""
    lengths = torch.tensor([len(row) for row in rows])
    filled = pad_sequence([row.long() for row in rows], batch_first=True)
    return filled, torch.arange(filled.shape[1]) < lengths[:, None]


def packed(order: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yields neighbours whose longest, times their number, is at most `batch_tokens`."""
    batch: list[int] = []
    longest = 0
    for index in order:
        longest = max(longest, lengths[index])
        if batch and longest * (len(batch) + 1) > batch_tokens:
            yield batch
            batch, longest = [], lengths[index]
        batch.append(index)
    if batch:
        yield batch


def learning_rate_share(share: float) -> float:
    """The learning rate as a share of its peak: linear rise, then half a cosine."""
    if share < WARMUP_SHARE:
        return max(share, 1e-4) / WARMUP_SHARE
    done = min((share - WARMUP_SHARE) / (1 - WARMUP_SHARE), 1.0)
    return LEARNING_RATE_LAST + (1 - LEARNING_RATE_LAST) * (1 + math.cos(math.pi * done)) / 2


def make_optimizer(
    model: torch.nn.Module, learning_rate: float, weight_decay: float = WEIGHT_DECAY
) -> torch.optim.AdamW:
    """Returns AdamW with weight decay for matrices only: it would shrink norms."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    plain = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=ADAM_BETAS, weight_decay=weight_decay, fused=True)


def check_checkpoint(file: Path, settings: str) -> None:
    """Raises ConfigError for a checkpoint of other settings."""
    if not file.is_file():
        return
    with safe_open(file, "pt") as opened:
        if opened.metadata().get("settings") != settings:
            raise ConfigError(f"{file} is of other settings: remove it, or give another --out")


class Learner(Protocol):
    """What is trained: a module on its device, with its loss and its held-out acceptance."""

    @property
    def student(self) -> torch.nn.Module:
        """The trained module."""

    def backward(self, batch: Batch) -> float:
        """Adds the gradients of the mean loss of a batch to the student's parameters; returns that loss."""

    def acceptances(self, batch: Batch) -> dict[str, Tensor]:
        """Returns acceptance by position, by names such as "COUPLED 0.7"; called without gradients."""


class Trainer:
    """A run of one learner, of which the `student` is trained. `clock`: seconds, for a budget in minutes."""

    def __init__(
        self,
        learner: Learner,
        plan: Plan,
        data: Data,
        heldout: Data,
        checkpoint: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._learner = learner
        self.student = learner.student
        self._plan = plan
        self._data, self._heldout = data, heldout
        self._optimizer = make_optimizer(self.student, plan.learning_rate)
        self._checkpoint = checkpoint
        self._clock = clock
        self.progress = Progress()
        self.best_state: dict[str, Tensor] = {}

    def resume(self) -> bool:
        """Continues from the checkpoint, if there is one; returns whether there is. Raises ConfigError for one of other
        texts."""
        if not self._checkpoint.is_file():
            return False
        with safe_open(self._checkpoint, "pt", device=self._plan.device) as file:
            if file.metadata()["texts"] != self._plan.texts:
                raise ConfigError(f"{self._checkpoint} is of other texts: remove it, or give another --out")
            saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            self.progress = Progress(**json.loads(file.metadata()["progress"]))
        parts: dict[str, dict[str, Tensor]] = {"student": {}, "best": {}, "optimizer": {}}
        for name, tensor in saved.items():
            part, _, own = name.partition("/")
            parts[part][own] = tensor
        self.student.load_state_dict(parts["student"])
        self.best_state = parts["best"]
        states: dict[int, dict[str, Tensor]] = {}
        for name, tensor in parts["optimizer"].items():
            index, _, own = name.partition("/")
            states.setdefault(int(index), {})[own] = tensor
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": states})
        return True

    def save(self) -> None:
        """Writes the checkpoint, whole or not at all."""
        saved = {f"student/{name}": tensor.clone() for name, tensor in self.student.state_dict().items()}
        saved |= {f"best/{name}": tensor for name, tensor in self.best_state.items()}
        for index, state in self._optimizer.state_dict()["state"].items():
            saved |= {f"optimizer/{index}/{name}": tensor for name, tensor in state.items()}
        unfinished = self._checkpoint.with_suffix(".unfinished")
        about = {"settings": self._plan.settings, "texts": self._plan.texts}
        about["progress"] = json.dumps(asdict(self.progress))
        save_file(saved, unfinished, metadata=about)
        os.replace(unfinished, self._checkpoint)

    def share(self) -> float:
        """The finished share of the budget."""
        if self._plan.minutes:
            return self.progress.seconds / (60 * self._plan.minutes)
        return self.progress.tokens / self._plan.token_budget

    def run(self, told: Callable[[float, Progress], None] = lambda loss, progress: None) -> None:
        """Trains until the budget is used or acceptance no longer improves; then the student has its best weights."""
        own, plan = self.progress, self._plan
        if not own.history:
            self._evaluate()
        next_tokens = own.history[-1]["tokens"] + plan.evaluate_tokens
        while self.share() < 1 and own.unimproved < plan.patience:
            batches = self._data.epoch(plan.seed, own.epoch, plan.batch_tokens)
            for indices in batches[own.batch :]:
                began_s = self._clock()
                loss = self._step(self._data.batch(indices))
                own.step, own.batch = own.step + 1, own.batch + 1
                own.seconds += self._clock() - began_s
                told(loss, own)
                if own.tokens >= next_tokens or self.share() >= 1:
                    self._evaluate()
                    self.save()
                    next_tokens = own.tokens + plan.evaluate_tokens
                    if self.share() >= 1 or own.unimproved >= plan.patience:
                        break
            else:
                own.epoch, own.batch = own.epoch + 1, 0
        self.student.load_state_dict(self.best_state)

    def _step(self, batch: Batch) -> float:
        """One forward, backward and update; returns the loss before the update."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._plan.learning_rate * learning_rate_share(self.share())
        loss = self._learner.backward(batch)
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), GRADIENT_NORM_MAX)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.progress.tokens += batch.token_count
        return loss

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Measures held-out acceptance, and keeps the best weights."""
        sums: dict[str, list[float]] = {}
        everything = packed(
            range(len(self._heldout.texts)), self._heldout.texts.lengths.tolist(), self._plan.batch_tokens
        )
        for indices in everything:
            for name, values in self._learner.acceptances(self._heldout.batch(indices)).items():
                entry = sums.setdefault(name, [0.0, 0.0])
                entry[0] += float(values.sum())
                entry[1] += len(values)
        found = {name: total / count for name, (total, count) in sorted(sums.items()) if count}
        own = self.progress
        mean = sum(found.values()) / len(found)
        own.history.append({"tokens": own.tokens, "seconds": round(own.seconds, 1), "acceptance": found})
        own.unimproved = 0 if mean > own.best else own.unimproved + 1
        if mean > own.best or not self.best_state:
            own.best = mean
            self.best_state = {name: weight.detach().clone() for name, weight in self.student.state_dict().items()}
