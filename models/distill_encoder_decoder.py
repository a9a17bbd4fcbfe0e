"""Makes the draft of the encoder-decoder pair: the target's encoder and one decoder layer, which imitate the target.

The texts are outputs for inputs of the corpus, every fourth one written by the target, at temperatures 0, 0.7 and 1 in
turn; the others are those of the files. The loss is the forward divergence KL(target || draft). Texts and checkpoint
are kept, and a run continues from them.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, T5ForConditionalGeneration

from models.console import progress_over, run_command
from models.encoder_decoder import build_draft, pair_data, save_model
from models.formatting import TOKENS_MAX, Pairs, read_pairs
from models.sizes import ENCODER_DECODER_SIZES
from models.tokenizer import END_TOKEN_ID, SPLITS, load_tokenizer
from models.train_encoder_decoder import add_pair_options, digest_of, learn, plan_of, prepare_run
from specdec.distill.texts import LabelledTexts, label
from specdec.distill.training import padded
from specdec.errors import ConfigError

TEMPERATURES = (0.0, 0.7, 1.0)
FILE_TEXTS = 768
TRAIN_EVERY = 4  # the target writes one text of this number


def load_model(folder: Path) -> Any:
    """Returns the model of a folder in float32. Raises ConfigError without one."""
    if not (folder / "model.safetensors").is_file():
        raise ConfigError(f"{folder} holds no model.safetensors; name a model folder")
    return T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, use_safetensors=True).eval()


@torch.inference_mode()
def written(target: Any, inputs: Sequence[Tensor], temperature: float) -> list[Tensor]:
    """Returns what the target writes for these inputs, from `<|end|>` to the last token before the next.  # [tokens]
    int32 each; draws are those of torch's global generator"""
    sources, is_source = padded(inputs)
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    # That of `generate` has a layer for each of the encoder.
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    asked = {"attention_mask": is_source.long(), "max_new_tokens": TOKENS_MAX, "past_key_values": cache}
    rows = target.generate(sources, **asked, **drawn)
    ends = [(row[1:] == END_TOKEN_ID).nonzero().flatten().tolist() for row in rows]
    return [row[: end[0] + 1 if end else TOKENS_MAX].to(torch.int32) for row, end in zip(rows, ends)]


@torch.inference_mode()
def labels_of(target: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the target's likeliest ids and their log-probabilities after each token of the outputs."""
    (sources, is_source), (texts, is_text) = padded(inputs), padded(outputs)
    logits = target(sources, attention_mask=is_source, decoder_input_ids=texts, use_cache=False).logits
    return label(logits[is_text].float())


def labelled(target: Any, pairs: Pairs, every: int) -> LabelledTexts:
    """Returns texts for the inputs of pairs; the first of each `every` is the target's own. All have its labels."""
    inputs, outputs = (
        list(tokens.split(lengths.tolist()))
        for tokens, lengths in ((pairs.inputs, pairs.input_lengths), (pairs.outputs, pairs.output_lengths))
    )
    temperatures = [TEMPERATURES[index // every % len(TEMPERATURES)] for index in range(len(pairs))]
    for temperature in TEMPERATURES:
        asked = [index for index in range(0, len(pairs), every) if temperatures[index] == temperature]
        for index, text in zip(
            asked, written(target, [inputs[index] for index in asked], temperature) if asked else ()
        ):
            outputs[index] = text
    parts = [
        labels_of(target, inputs[first : first + 32], outputs[first : first + 32]) for first in range(0, len(pairs), 32)
    ]
    ids, log_probs = zip(*parts)
    return labelled_texts(outputs, (torch.cat(ids), torch.cat(log_probs)), temperatures)


def labelled_texts(
    outputs: Sequence[Tensor], labels: tuple[Tensor, Tensor], temperatures: Sequence[float]
) -> LabelledTexts:
    """Returns outputs as texts that are learned whole."""
    zeros = torch.zeros(len(outputs), dtype=torch.int32)
    return LabelledTexts(
        token_ids=torch.cat(list(outputs)),
        likeliest_ids=labels[0],
        log_probs=labels[1],
        lengths=torch.tensor([len(text) for text in outputs], dtype=torch.int32),
        learned_from=zeros,
        answered_from=zeros.clone(),  # a file has no tensor twice
        temperatures=torch.tensor(temperatures),
    )


def kept_texts(asked: argparse.Namespace, target: Any, pairs: Pairs, split: str, every: int) -> LabelledTexts:
    """Returns the texts of pairs, from the files of texts written before as far as there are any."""
    parts = []
    starts = range(0, len(pairs), FILE_TEXTS)
    with progress_over(starts, f"the target writes: {split}") as shown:
        for first in shown:
            file = asked.out / "texts" / f"{split}-{first:07d}.safetensors"
            own = pairs.chosen(range(first, min(first + FILE_TEXTS, len(pairs))))
            origin = f"{asked.target_digest}/{asked.seed}/{every}/{digest_of(own)}"
            if not file.is_file():
                torch.manual_seed(asked.seed * 1_000_003 + first)
                labelled(target, own, every).save(file, origin)
            parts.append(LabelledTexts.load(file, origin))
    return LabelledTexts.joined(parts)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog="python -m models.distill_encoder_decoder", description=__doc__)
    add_pair_options(options)
    options.add_argument("--target", type=Path, required=True, help="folder models.train_encoder_decoder wrote")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Distils and saves; shows acceptance on held-out texts of the target."""
    asked = parser().parse_args(arguments)
    prepare_run(asked)
    size = ENCODER_DECODER_SIZES[asked.size]
    target = load_model(asked.target)
    asked.target_digest = hashlib.sha256((asked.target / "model.safetensors").read_bytes()).hexdigest()
    chance = torch.Generator().manual_seed(asked.seed)
    counts = {"train": size.draft_text_count, "heldout": size.heldout_text_count}
    data, used = {}, []
    for split, every in zip(SPLITS, (TRAIN_EVERY, 1)):
        pairs = read_pairs(asked.data, split)
        pairs = pairs.chosen(torch.randperm(len(pairs), generator=chance)[: counts[split]].tolist())
        used.append(pairs)
        data[split] = pair_data(kept_texts(asked, target, pairs, split, every), pairs)
    draft = build_draft(target, size)
    plan = plan_of(asked, size, size.draft_tokens, f"{asked.target_digest}/{digest_of(*used)}")
    facts = learn(draft, plan, data["train"], data["heldout"], asked.out, "the draft learns")
    save_model(draft, load_tokenizer(asked.target), facts, asked.out)


if __name__ == "__main__":
    run_command(main)
