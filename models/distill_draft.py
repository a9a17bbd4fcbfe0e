"""Distils the draft: one layer that learns the target's whole distribution, not only the text's next token.

The loss is the forward divergence KL(target || draft) at every position. It asks the draft to cover all the target
may say, and bounds what rejection loses: 1 - sum min(target, draft) <= sqrt(KL / 2) (Pinsker). Embeddings begin as
the target's and are trained on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from transformers import LlamaForCausalLM

from specdec.errors import ConfigError
from specdec.models.console import run_command
from specdec.models.sizes import SIZES, Size
from specdec.models.tokenizer import SPLITS, read_tokens
from specdec.models.train_target import copy_tokenizer
from specdec.models.training import add_run_options, build_model, run_settings, save_model, show_report, train

DRAFT_LAYER_COUNT = 1


def build_draft(size: Size, target: LlamaForCausalLM) -> LlamaForCausalLM:
    """A one-layer model with the target's embeddings, which are its output layer too."""
    if target.config.vocab_size != size.vocabulary_size or target.config.hidden_size != size.hidden_size:
        raise ConfigError(f"the target is not of size {size.name}: vocabulary and hidden size must be equal")
    draft = build_model(size, DRAFT_LAYER_COUNT)
    with torch.no_grad():
        weight = target.get_input_embeddings().get_parameter("weight")
        draft.get_input_embeddings().get_parameter("weight").copy_(weight)
    return draft


def divergence(draft: LlamaForCausalLM, target: LlamaForCausalLM, sequences: Tensor) -> Tensor:
    """Mean KL(target || draft) over the positions of [batch, length + 1] tokens, in nats.  # scalar float32"""
    inputs = sequences[:, :-1]
    with torch.no_grad():
        target_logits = target(input_ids=inputs, use_cache=False).logits.float()  # [batch, length, vocab] float32
    draft_logits = draft(input_ids=inputs, use_cache=False).logits.float()  # [batch, length, vocab] float32
    target_log_probs = log_softmax(target_logits, dim=-1).flatten(0, 1)
    draft_log_probs = log_softmax(draft_logits, dim=-1).flatten(0, 1)
    return kl_div(draft_log_probs, target_log_probs, reduction="batchmean", log_target=True)


def load_target(folder: Path, device: str) -> LlamaForCausalLM:
    """The target in float32, frozen."""
    if not (folder / "model.safetensors").is_file():
        raise ConfigError(f"{folder} holds no model.safetensors; run python -m models.train_target first")
    target: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    target.to(device)  # type: ignore[arg-type]  # a wrapper of transformers hides the types of `to`
    target.eval().requires_grad_(False)
    return target


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog="python -m models.distill_draft", description=__doc__)
    add_run_options(options)
    options.add_argument("--target", type=Path, required=True, help="folder models.train_target wrote")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Distils and saves; shows the held-out loss before and after."""
    options = parser().parse_args(arguments)
    size = SIZES[options.size]
    settings = run_settings(options, size.draft_steps)
    target = load_target(options.target, settings.device)
    draft = build_draft(size, target)
    draft.to(settings.device)  # type: ignore[arg-type]  # a wrapper of transformers hides the types of `to`
    arrays = [read_tokens(options.data, split) for split in SPLITS]
    report = train(draft, partial(divergence, draft, target), arrays, size, settings)
    save_model(draft, report, settings, size, options.out)
    copy_tokenizer(options.target, options.out)
    print(show_report(report))


if __name__ == "__main__":
    run_command(main)
