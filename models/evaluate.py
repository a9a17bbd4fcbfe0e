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

from models.console import run_command
from models.data import PROMPTS_FILE, read_prompts
from models.tokenizer import END_TOKEN_ID, load_tokenizer, read_tokens
from models.training import heldout_loss
from specdec.advise.forecast import Estimate
from specdec.advise.measuring import EVERYTHING, readings_of, written
from specdec.advise.report import cells_of
from specdec.engine.loading.model import load_offline_target
from specdec.engine.loading.model_folder import open_model_folder, shown_name
from specdec.errors import ConfigError
from specdec.folders import EMBEDDED_MODELS

TEMPERATURES = "0,0.7,1"
SEQUENCE_LENGTH = 512


def prompt_loss(model: LlamaForCausalLM, prompts: Sequence[tuple[int, ...]]) -> float:
    """Mean loss per token over prompts, each begun by `<|end|>`. Nats."""
    losses = [
        heldout_loss(model, numpy.array([END_TOKEN_ID, *prompt], dtype=numpy.uint16), len(prompt)) for prompt in prompts
    ]
    return float(numpy.average(losses, weights=[len(prompt) for prompt in prompts]))


def load_pair(options: argparse.Namespace) -> dict[str, LlamaForCausalLM]:
    """Target and draft by name, in float32."""
    transformers_logging.disable_progress_bar()
    pair = {}
    for name in ("target", "draft"):
        folder = getattr(options, name)
        if not (folder / "model.safetensors").is_file():
            raise ConfigError(f"{folder} holds no model.safetensors; name a model folder with --{name}")
        pair[name] = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True).eval()
    if pair["target"].config.vocab_size != pair["draft"].config.vocab_size:
        raise ConfigError(f"{options.target} and {options.draft} have no common vocabulary")
    return pair


def acceptance(options: argparse.Namespace, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Acceptance by temperature and rule, with the bounds of its 95 % interval, as `specdec advise` measures it: the
    target answers each prompt once at each temperature. `bound`: that of the best possible rule."""
    target_name, draft_name = str(options.target), str(options.draft)
    names, console = (target_name, draft_name, shown_name(draft_name)), Console(stderr=True)
    target = load_offline_target(target_name)
    about = TEMPERATURES, options.tokens, 0
    texts = written(target, open_model_folder(target_name), about, dict.fromkeys(prompts, EVERYTHING), console)
    cells = cells_of(readings_of(target, names, texts, "cpu", console))

    def told(estimate: Estimate) -> list[float]:
        return [estimate.value, estimate.low, estimate.high]

    return [
        {
            "temperature": cell.temperature,
            "acceptance": {rule: told(estimate) for rule, estimate in cell.acceptance.items()},
            "bound": 1 - cell.variation.value if cell.temperature else 1.0,
        }
        for cell in cells
    ]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns all measurements as one JSON value."""
    pair = load_pair(options)
    words = load_tokenizer(options.target)
    texts = read_prompts(options.prompts)
    prompts = [tuple(words.encode(text, add_special_tokens=False).ids) for text in texts]
    measurements: dict[str, Any] = {"prompts": options.prompt_count, "tokens": options.tokens}
    measurements["prompt_loss"] = {name: prompt_loss(model, prompts) for name, model in pair.items()}
    if options.data is not None:
        token_ids = read_tokens(options.data, "heldout")
        length = min(SEQUENCE_LENGTH, pair["target"].config.max_position_embeddings)
        measurements["heldout_loss"] = {name: heldout_loss(model, token_ids, length) for name, model in pair.items()}
    measurements["acceptance"] = acceptance(options, texts[: options.prompt_count])
    return measurements


def show(measurements: dict[str, Any]) -> None:
    """Two small tables for people."""
    losses = Table("loss, nats per token", "target", "draft")
    for name in ("prompt_loss", "heldout_loss"):
        if name in measurements:
            losses.add_row(name, *(f"{measurements[name][model]:.2f}" for model in ("target", "draft")))
    shares = Table("temperature", "rule", "acceptance", "95 %", "bound")
    for entry in measurements["acceptance"]:
        bound = f"{entry['bound']:.3f}" if entry["temperature"] else ""
        for rule, (value, low, high) in entry["acceptance"].items():
            shares.add_row(f"{entry['temperature']:g}", rule, f"{value:.3f}", f"{low:.3f} to {high:.3f}", bound)
    console = Console()
    console.print(losses, shares)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog="python -m models.evaluate", description=__doc__)
    options.add_argument(
        "--target", type=Path, default=EMBEDDED_MODELS / "target", help="model folder (default: shipped)"
    )
    options.add_argument(
        "--draft", type=Path, default=EMBEDDED_MODELS / "draft", help="model folder (default: shipped)"
    )
    options.add_argument("--data", type=Path, help="folder with held-out tokens; without it no heldout_loss")
    options.add_argument("--prompts", type=Path, default=PROMPTS_FILE, help="prompts file (default: the shipped)")
    options.add_argument("--prompt-count", type=int, default=24, help="texts to write (default: %(default)s)")
    options.add_argument("--tokens", type=int, default=128, help="tokens per text (default: %(default)s)")
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
