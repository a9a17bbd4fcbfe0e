"""Measures a pair: its loss on held-out text, and the acceptance of the draft's tokens by the target.

Held-out files are needed for `heldout_loss` (--data, from models.data and models.tokenizer); the shipped prompts
suffice for everything else. `prompt_loss` is higher than `heldout_loss`, for a prompt is short and begins anywhere.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from specdec.errors import ConfigError
from specdec.models.agreement import acceptance
from specdec.models.console import progress_over, run_command
from specdec.models.data import PROMPTS_FILE, read_prompts
from specdec.models.tokenizer import END_TOKEN_ID, load_tokenizer, read_tokens
from specdec.models.training import heldout_loss

FOLDER = Path(__file__).parent
TEMPERATURES = (0.0, 0.7, 1.0)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SEQUENCE_LENGTH = 512


def prompt_loss(model: LlamaForCausalLM, prompts: Sequence[tuple[int, ...]]) -> float:
    """Mean loss per token over prompts, each begun by `<|end|>`. Nats."""
    losses = [
        heldout_loss(model, numpy.array([END_TOKEN_ID, *prompt], dtype=numpy.uint16), len(prompt)) for prompt in prompts
    ]
    return float(numpy.average(losses, weights=[len(prompt) for prompt in prompts]))


def load_pair(options: argparse.Namespace) -> dict[str, LlamaForCausalLM]:
    """Target and draft by name."""
    transformers_logging.disable_progress_bar()
    pair = {}
    for name in ("target", "draft"):
        folder = getattr(options, name)
        if not (folder / "model.safetensors").is_file():
            raise ConfigError(f"{folder} holds no model.safetensors; name a model folder with --{name}")
        model = LlamaForCausalLM.from_pretrained(folder, dtype=DTYPES[options.dtype], use_safetensors=True)
        pair[name] = model.eval()
    if pair["target"].config.vocab_size != pair["draft"].config.vocab_size:
        raise ConfigError(f"{options.target} and {options.draft} have no common vocabulary")
    return pair


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns all measurements as one JSON value."""
    pair = load_pair(options)
    words = load_tokenizer(options.target)
    texts = read_prompts(options.prompts)
    prompts = [tuple(words.encode(text, add_special_tokens=False).ids) for text in texts]
    measurements: dict[str, Any] = {"dtype": options.dtype, "prompts": options.prompt_count, "tokens": options.tokens}
    measurements["prompt_loss"] = {name: prompt_loss(model, prompts) for name, model in pair.items()}
    if options.data is not None:
        token_ids = read_tokens(options.data, "heldout")
        length = min(SEQUENCE_LENGTH, pair["target"].config.max_position_embeddings)
        measurements["heldout_loss"] = {name: heldout_loss(model, token_ids, length) for name, model in pair.items()}
    chosen = prompts[: options.prompt_count]
    measurements["acceptance"] = []
    with progress_over(TEMPERATURES, "generating") as shown:
        for temperature in shown:
            shares = acceptance(pair["target"], pair["draft"], chosen, temperature, options.tokens)
            entry = {
                "temperature": temperature,
                "shares": {rule: share.mean for rule, share in shares.items()},
                "errors": {rule: share.error for rule, share in shares.items()},
            }
            measurements["acceptance"].append(entry)
    return measurements


def show(measurements: dict[str, Any]) -> None:
    """Two small tables for people."""
    losses = Table("loss, nats per token", "target", "draft")
    for name in ("prompt_loss", "heldout_loss"):
        if name in measurements:
            losses.add_row(name, *(f"{measurements[name][model]:.2f}" for model in ("target", "draft")))
    shares = Table("temperature", "rule", "acceptance", "standard error")
    for entry in measurements["acceptance"]:
        for rule, share in entry["shares"].items():
            shares.add_row(f"{entry['temperature']:g}", rule, f"{share:.3f}", f"{entry['errors'][rule]:.3f}")
    console = Console()
    console.print(losses, shares)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog="python -m models.evaluate", description=__doc__)
    options.add_argument("--target", type=Path, default=FOLDER / "target", help="model folder (default: the shipped)")
    options.add_argument("--draft", type=Path, default=FOLDER / "draft", help="model folder (default: the shipped)")
    options.add_argument("--data", type=Path, help="folder with held-out tokens; without it no heldout_loss")
    options.add_argument("--prompts", type=Path, default=PROMPTS_FILE, help="prompts file (default: the shipped)")
    options.add_argument("--prompt-count", type=int, default=24, help="texts to write (default: %(default)s)")
    options.add_argument("--tokens", type=int, default=128, help="tokens per text (default: %(default)s)")
    slow = "bfloat16 is slow on a CPU without it"
    options.add_argument("--dtype", choices=DTYPES, default="float32", help=f"{slow} (default: %(default)s)")
    options.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    options.add_argument("--json", action="store_true", help="print one JSON value instead of tables")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and shows."""
    options = parser().parse_args(arguments)
    if min(options.prompt_count, options.tokens, options.threads) < 1:
        raise ConfigError("--prompt-count, --tokens and --threads must be at least 1")
    torch.set_num_threads(options.threads)
    measurements = measure(options)
    if options.json:
        print(json.dumps(measurements))
    else:
        show(measurements)


if __name__ == "__main__":
    run_command(main)
