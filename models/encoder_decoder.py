"""The encoder-decoder models of the recipe: their shape, batches of pairs, what `Trainer` trains, and their folders.

The target learns texts of which each position has one label, the next token: the divergence from it is the
cross-entropy. The draft learns the target's distributions in the same way.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

from models.formatting import TOKENS_MAX, Pairs
from models.sizes import EncoderDecoderSize
from models.tokenizer import END_TOKEN, END_TOKEN_ID
from specdec.distill.learners import DraftLearner
from specdec.distill.texts import LabelledTexts
from specdec.distill.training import Data, Plan
from specdec.engine.loading.folder_files import write_manifest

BRANCH_SCALE = 0.3  # of what a fresh layer adds


def build_model(size: EncoderDecoderSize, vocabulary_size: int, decoder_layer_count: int) -> Any:
    """Returns a T5 of version 1.1's form (gated GELU), its output layer tied to the embeddings, with fresh weights from
    torch's global generator, which copy (`copy_at_first`)."""
    values: dict[str, Any] = {
        "vocab_size": vocabulary_size,
        "d_model": size.hidden_size,
        "d_kv": size.head_size,
        "d_ff": size.mlp_size,
        "num_layers": size.encoder_layer_count,
        "num_decoder_layers": decoder_layer_count,
        "num_heads": size.head_count,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
        "tie_word_embeddings": True,
        "n_positions": TOKENS_MAX + 1,  # of an input and of an output
        "decoder_start_token_id": END_TOKEN_ID,
        "eos_token_id": END_TOKEN_ID,
        "pad_token_id": END_TOKEN_ID,
    }
    model = T5ForConditionalGeneration(T5Config(**values))
    copy_at_first(model)
    return model


def copy_at_first(model: Any) -> None:
    """Changes fresh weights in place so that the model begins as one that copies: most of an output is its input, and
    heads that find the place are slow to form ("induction heads", Olsson et al. 2022).

    The first encoder layer's first head attends to the token before and writes it beside the token; the first decoder
    layer's heads look for the place behind the last output token, and write the token there, a part each. All other
    layers begin small. The heads together have the hidden size.
    """
    config = model.config
    width, size = config.d_kv, config.d_model
    for block in (*model.encoder.block, *model.decoder.block):
        for layer in block.layer[:-1]:
            own = layer.EncDecAttention if hasattr(layer, "EncDecAttention") else layer.SelfAttention
            own.o.weight.data.mul_(BRANCH_SCALE)
        block.layer[-1].DenseReluDense.wo.weight.data.mul_(BRANCH_SCALE)
    basis, places = torch.linalg.qr(torch.randn(size, size))[0], torch.linalg.qr(torch.randn(size, width))[0]
    before = model.encoder.block[0].layer[0].SelfAttention
    before.relative_attention_bias.weight.data[:, 0] = 0.0
    before.relative_attention_bias.weight.data[1, 0] = 8.0  # the bucket of distance 1 to the left
    for projection in (before.q, before.k):
        projection.weight.data[:width] = 0.0
    before.v.weight.data[:width] = basis[:width]
    before.o.weight.data[:, :width] = 2.0 * places
    copying = model.decoder.block[0].layer[1].EncDecAttention
    copying.q.weight.data.copy_(basis[:width].repeat(config.num_heads, 1))
    copying.k.weight.data.copy_(0.5 * places.T.repeat(config.num_heads, 1))
    copying.v.weight.data.copy_(basis)
    copying.o.weight.data.copy_(4.0 * basis.T)


def build_draft(target: Any, size: EncoderDecoderSize) -> Any:
    """Returns a draft that starts from the target: its embeddings, its encoder and its first decoder layer."""
    draft = build_model(size, target.config.vocab_size, 1)
    weights = target.state_dict()
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
    return draft


def pair_data(texts: LabelledTexts, pairs: Pairs) -> Data:
    """Returns labelled texts, the outputs of pairs, with the inputs of the same pairs."""
    whole = replace(texts, input_ids=pairs.inputs, input_lengths=pairs.input_lengths)
    return Data(whole, whole.learned_from, None)


def certain_texts(pairs: Pairs) -> LabelledTexts:
    """Returns the outputs of pairs as texts whose labels are the next tokens and, last, the end."""
    following = [torch.cat([row[1:], row[:1]]) for row in pairs.outputs.split(pairs.output_lengths.tolist())]
    zeros = torch.zeros(len(pairs), dtype=torch.int32)
    return LabelledTexts(
        token_ids=pairs.outputs,
        likeliest_ids=torch.cat(following)[:, None],
        log_probs=torch.zeros(len(pairs.outputs), 1, dtype=torch.float16),
        lengths=pairs.output_lengths,
        learned_from=zeros,
        answered_from=zeros,
        temperatures=zeros.float(),
    )


class PairLearner(DraftLearner):
    """A `Learner`: an encoder-decoder, of batches of `pair_data`."""

    def __init__(self, student: Any, plan: Plan) -> None:
        super().__init__(student.eval(), student.config.vocab_size, plan)  # without dropout, for good
        self.student.set_attn_implementation("eager")  # the faster one with a bias of distances, on CPU


def save_model(model: Any, tokenizer: Tokenizer, facts: dict[str, Any], out: Path) -> None:
    """Writes bf16 safetensors, the tokenizer, which ends each text with `<|end|>` as that of T5 does, the generation
    configuration and the facts of the run. Changes the model's dtype."""
    model.generation_config = GenerationConfig(
        decoder_start_token_id=END_TOKEN_ID, eos_token_id=END_TOKEN_ID, pad_token_id=END_TOKEN_ID
    )
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # written readable by its owner alone
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {END_TOKEN}", pair=f"$A $B {END_TOKEN}", special_tokens=[(END_TOKEN, END_TOKEN_ID)]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "pad_token": END_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": TOKENS_MAX + 1,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    write_manifest(out)
    (out / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
