"""Trains the target of the encoder-decoder pair from nothing on the pairs of `models.formatting`: cross-entropy of the
outputs, AdamW, cosine learning rate.

Writes a checkpoint at each evaluation and continues from it. Leaves a model folder that `transformers` loads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from models.console import run_command
from models.encoder_decoder import PairLearner, build_model, certain_texts, pair_data, save_model
from models.formatting import Pairs, read_pairs
from models.sizes import ENCODER_DECODER_SIZES, EncoderDecoderSize
from models.tokenizer import SPLITS, load_tokenizer
from models.training import add_run_options, prepare
from specdec.distill.command import CHECKPOINT_FILE, train
from specdec.distill.training import Data, Plan, Trainer, check_checkpoint
from specdec.distill.written import make_folder
from specdec.errors import ConfigError
from specdec.folders import EMBEDDED_MODELS
from specdec.terminal import make_console

NEVER = 1 << 30  # evaluations without a better one that end a run: it has its budget


def add_pair_options(options: argparse.ArgumentParser) -> None:
    """The options of a run."""
    length = "tokens", "tokens of outputs to train on"
    add_run_options(options, "the pairs models.formatting wrote", ENCODER_DECODER_SIZES, length, "CPU")


def prepare_run(asked: argparse.Namespace) -> None:
    """Sets threads and torch's global seed. Raises ConfigError for a run of no length."""
    if (asked.tokens is not None and asked.tokens < 1) or (asked.minutes is not None and not asked.minutes > 0):
        raise ConfigError("--tokens must be at least 1, --minutes above 0")
    prepare(asked)


def plan_of(asked: argparse.Namespace, size: EncoderDecoderSize, tokens: int, texts_digest: str) -> Plan:
    """Returns the plan of a run. `tokens`: the size's length."""
    settings = {"size": size.name, "seed": asked.seed, "device": asked.device, "bf16": asked.bf16}
    return Plan(
        loss="kl",
        temperatures=(1.0,),
        learning_rate=size.learning_rate,
        batch_tokens=size.batch_tokens,
        token_budget=0 if asked.minutes else asked.tokens or tokens,
        minutes=asked.minutes or 0.0,
        evaluate_tokens=max(1, (asked.tokens or tokens) // size.evaluation_count),
        patience=NEVER,
        seed=asked.seed,
        device=asked.device,
        bf16=asked.bf16,
        settings=json.dumps(settings),
        texts=texts_digest,
    )


def learn(model: Any, plan: Plan, data: Data, heldout: Data, out: Path, activity: str) -> dict[str, Any]:
    """Trains the model in place, from the checkpoint on if there is one; returns the facts of the run."""
    make_folder(out, "--out")
    check_checkpoint(out / CHECKPOINT_FILE, plan.settings)
    trainer = Trainer(PairLearner(model, plan), plan, data, heldout, out / CHECKPOINT_FILE, time.process_time)
    train(trainer, activity, make_console(is_for_errors=True))
    parameters = sum(weight.numel() for weight in model.parameters())
    return {"settings": json.loads(plan.settings), "parameters": parameters, "history": trainer.progress.history}


def digest_of(*parts: Pairs) -> str:
    """Returns a digest of pairs."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.inputs.numpy().tobytes() + part.outputs.numpy().tobytes())
    return whole.hexdigest()


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog="python -m models.train_encoder_decoder", description=__doc__)
    add_pair_options(options)
    options.add_argument(
        "--tokenizer",
        type=Path,
        default=EMBEDDED_MODELS / "target",
        help="folder with a tokenizer.json (default: the shipped)",
    )
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and saves; shows the share of held-out tokens that it predicts."""
    asked = parser().parse_args(arguments)
    prepare_run(asked)
    size = ENCODER_DECODER_SIZES[asked.size]
    tokenizer = load_tokenizer(asked.tokenizer)
    pairs, heldout = (read_pairs(asked.data, split) for split in SPLITS)
    heldout = heldout.chosen(torch.randperm(len(heldout))[: size.heldout_text_count].tolist())
    plan = plan_of(asked, size, size.target_tokens, digest_of(pairs, heldout))
    torch.manual_seed(asked.seed)
    model = build_model(size, tokenizer.get_vocab_size(), size.decoder_layer_count)
    data = pair_data(certain_texts(pairs), pairs), pair_data(certain_texts(heldout), heldout)
    facts = learn(model, plan, *data, asked.out, "the target learns")
    save_model(model, tokenizer, facts, asked.out)


if __name__ == "__main__":
    run_command(main)
