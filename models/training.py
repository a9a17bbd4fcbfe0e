"""The training of the target: sequences, schedule, the loop, held-out loss, saving.

Everything random comes from the seed and everything timed from the clock passed in, so a run of a given number of
steps is the same each time on the same machine, library and number of threads. A run of a given number of minutes is
not: its length depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from models.console import progress_bar
from models.sizes import SIZES, Size
from models.tokenizer import END_TOKEN_ID
from specdec.distill.training import GRADIENT_NORM_MAX, learning_rate_share, make_optimizer
from specdec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Budget:
    """The length of a run in steps or in minutes; exactly one is given."""

    steps: int | None
    minutes: float | None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError("give either --steps or --minutes")
        if self.steps is not None and self.steps < 1 or self.minutes is not None and not self.minutes > 0:
            raise ConfigError("--steps must be at least 1, --minutes above 0")

    def share(self, step: int, elapsed_s: float) -> float:
        """The finished share of the run; 1 and above ends it."""
        if self.minutes is not None:
            return elapsed_s / (self.minutes * 60)
        return step / (self.steps or 1)  # __post_init__ has refused a run without either


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a run beside the size."""

    budget: Budget
    seed: int
    device: str
    bf16: bool

    def autocast(self) -> torch.autocast:
        """Matrix products in bf16 where asked for; weights stay float32."""
        return torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16, enabled=self.bf16)


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """The report of a run, written beside the weights. Losses in nats per token."""

    steps: int
    tokens: int
    seconds: float
    heldout_loss_before: float
    heldout_loss_after: float


class Sequences:
    """Training sequences of `length + 1` tokens, each used once before any is used again."""

    def __init__(self, token_ids: numpy.ndarray, length: int, seed: int) -> None:
        count = (len(token_ids) - 1) // length
        if count < 1:
            raise ConfigError(f"{len(token_ids)} tokens are too few for a sequence of {length + 1}")
        self._token_ids = token_ids  # [tokens] uint16
        self._length = length
        self._count = count
        self._generator = torch.Generator().manual_seed(seed)
        self._order: list[int] = []

    def batch(self, batch_size: int) -> Tensor:
        """The next sequences.  # [batch_size, length + 1] int64"""
        while len(self._order) < batch_size:
            self._order += torch.randperm(self._count, generator=self._generator).tolist()
        chosen, self._order = self._order[:batch_size], self._order[batch_size:]
        rows = [self._token_ids[i * self._length : (i + 1) * self._length + 1].astype(numpy.int64) for i in chosen]
        return torch.from_numpy(numpy.stack(rows))


def build_model(size: Size) -> LlamaForCausalLM:
    """A Llama model of the size with fresh weights from torch's global generator."""
    config = LlamaConfig(
        vocab_size=size.vocabulary_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.mlp_size,
        num_hidden_layers=size.layer_count,
        num_attention_heads=size.head_count,
        num_key_value_heads=size.kv_head_count,
        max_position_embeddings=size.positions_max,
        tie_word_embeddings=True,
        bos_token_id=END_TOKEN_ID,
        eos_token_id=END_TOKEN_ID,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def token_loss(model: LlamaForCausalLM, sequences: Tensor) -> Tensor:
    """Mean cross-entropy of each next token, in nats.  # scalar float32"""
    logits = model(input_ids=sequences[:, :-1], use_cache=False).logits.float()  # [batch, length, vocab] float32
    return cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, token_ids: numpy.ndarray, length: int, sequence_count_max: int = 64) -> float:
    """Mean loss over the first sequences of held-out tokens, in the model's own dtype. Nats per token."""
    model.eval()
    count = min((len(token_ids) - 1) // length, sequence_count_max)
    if count < 1:
        raise ConfigError(f"{len(token_ids)} held-out tokens are too few for a sequence of {length + 1}")
    total = 0.0
    for index in range(count):
        sequence = token_ids[index * length : (index + 1) * length + 1].astype(numpy.int64)
        total += token_loss(model, torch.from_numpy(sequence)[None].to(model.device)).item()
    return total / count


def run_steps(
    model: LlamaForCausalLM,
    sequences: Sequences,
    size: Size,
    settings: RunSettings,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Trains the model in place until the budget is used; returns the number of steps."""
    model.train()
    optimizer = make_optimizer(model, size.learning_rate, size.weight_decay)
    begin_s, step, share = clock(), 0, 0.0
    with progress_bar() as bar:
        task = bar.add_task("training", total=settings.budget.steps, note="")
        while share < 1:
            for group in optimizer.param_groups:
                group["lr"] = size.learning_rate * learning_rate_share(share)
            loss = train_step(model, sequences.batch(size.batch_size).to(settings.device), optimizer, settings)
            step += 1
            share = settings.budget.share(step, clock() - begin_s)
            bar.update(task, completed=step, note=f"loss {loss:.3f}")
    return step


def train_step(
    model: LlamaForCausalLM,
    batch: Tensor,  # [batch, length + 1] int64
    optimizer: torch.optim.Optimizer,
    settings: RunSettings,
) -> float:
    """One forward, backward and update; returns the loss before the update."""
    with settings.autocast():
        loss = token_loss(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def save_model(model: LlamaForCausalLM, report: TrainingReport, settings: RunSettings, size: Size, out: Path) -> None:
    """Writes bf16 safetensors, the generation configuration and a record of the run. Changes the model's dtype."""
    model.generation_config = GenerationConfig(bos_token_id=END_TOKEN_ID, eos_token_id=END_TOKEN_ID)
    model.to(torch.bfloat16)  # type: ignore[arg-type]  # a wrapper of transformers hides the types of `to`
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # written readable by its owner alone
    record = {"size": asdict(size), "settings": asdict(settings), "report": asdict(report)}
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def add_run_options(
    options: argparse.ArgumentParser,
    data: str = "the tokens models.tokenizer wrote",
    sizes: Iterable[str] = SIZES,
    length: tuple[str, str] = ("steps", "optimiser steps"),
    clock: str = "wall-clock",
) -> None:
    """The options of a run. `data`: what lies in the data folder; `length`: the flag of a run's length, and its unit;
    `clock`: the time that --minutes counts."""
    name, unit = length
    options.add_argument("--data", type=Path, required=True, help=f"folder with {data}")
    options.add_argument("--out", type=Path, required=True, help="model folder to write")
    options.add_argument("--size", choices=sizes, default="full", help="shape and length (default: %(default)s)")
    lengths = options.add_mutually_exclusive_group()
    lengths.add_argument(f"--{name}", type=int, help=f"{unit} (default: the size's)")
    lengths.add_argument("--minutes", type=float, help=f"{clock} time instead; not reproducible")
    options.add_argument("--seed", type=int, default=0, help="of weights and order (default: %(default)s)")
    options.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    options.add_argument("--device", default="cpu", help="cpu, cuda, … (default: %(default)s)")
    options.add_argument("--bf16", action="store_true", help="matrix products in bf16; faster where the CPU has it")


def prepare(options: argparse.Namespace) -> None:
    """Sets threads and torch's global seed, so call it before building a model."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    transformers_logging.disable_progress_bar()  # its bars for loading and saving would break into ours


def run_settings(options: argparse.Namespace, default_steps: int) -> RunSettings:
    """The options as checked values, of a run that is prepared."""
    steps = default_steps if options.steps is None and options.minutes is None else options.steps
    prepare(options)
    return RunSettings(Budget(steps, options.minutes), options.seed, options.device, options.bf16)


def show_report(report: TrainingReport) -> str:
    """One line for people."""
    return (
        f"{report.steps} steps, {report.tokens:,} tokens in {report.seconds:.0f} s; "
        f"held-out loss {report.heldout_loss_before:.3f} -> {report.heldout_loss_after:.3f} nats per token"
    )


def train(
    model: LlamaForCausalLM,
    arrays: Sequence[numpy.ndarray],  # train and held-out token ids, [tokens] uint16 each
    size: Size,
    settings: RunSettings,
) -> TrainingReport:
    """Trains the model in place and measures the held-out loss before and after."""
    train_ids, heldout_ids = arrays
    before = heldout_loss(model, heldout_ids, size.sequence_length)
    begin_s = time.monotonic()
    steps = run_steps(model, Sequences(train_ids, size.sequence_length, settings.seed), size, settings)
    seconds = time.monotonic() - begin_s
    after = heldout_loss(model, heldout_ids, size.sequence_length)
    return TrainingReport(steps, steps * size.batch_size * size.sequence_length, seconds, before, after)
