"""The encoder-decoder models of the recipe: their shape, batches of pairs, what `Trainer` trains, and their folders.

The target learns texts of which each position has one label, the next token: the divergence from it is the
cross-entropy. The draft learns the target's distributions in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

from models.formatting import TOKENS_MAX, Pairs
from models.sizes import EncoderDecoderSize
from models.tokenizer import END_TOKEN, END_TOKEN_ID
from specdec.distill.learners import DraftLearner, OutputLayer
from specdec.distill.losses import Labels
from specdec.distill.texts import LabelledTexts
from specdec.distill.training import Batch, Data, Plan
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


@dataclass(frozen=True, slots=True)
class PairBatch(Batch):
    """Texts as in a batch, and the encoder's input of each, shorter ones filled up."""

    sources: Tensor  # [texts, input length] int64
    is_source: Tensor  # [texts, input length] bool


class PairData(Data):
    """Labelled texts, the outputs of pairs, with the inputs of the same pairs."""

    def __init__(self, texts: LabelledTexts, pairs: Pairs) -> None:
        super().__init__(texts, texts.learned_from, None)
        self._inputs = pairs.inputs.split(pairs.input_lengths.tolist())

    def batch(self, indices: Sequence[int]) -> PairBatch:
        """Returns these texts as one batch."""
        own = super().batch(indices)
        sources, is_source = padded([self._inputs[index] for index in indices])
        return PairBatch(own.inputs, own.learned, own.labels, own.temperatures, sources, is_source)


def padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns rows side by side, shorter ones filled up, and where they are.  # [rows, length] int64, bool"""
    lengths = torch.tensor([len(row) for row in rows])
    return pad_sequence([row.long() for row in rows], batch_first=True), torch.arange(int(lengths.max())) < lengths[
        :, None
    ]


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


class TiedOutputLayer(OutputLayer):
    """The output layer of a T5 that is tied to its embeddings: hidden states scaled by hidden size ** -0.5."""

    def __init__(self, model: Any, plan: Plan) -> None:
        self._layer = model.get_output_embeddings()
        self._scale, self._softcap = model.config.d_model**-0.5, None
        self._own_size = model.config.vocab_size
        self._plan = plan


class PairLearner(DraftLearner):
    """A `Learner`: an encoder-decoder, of batches of `PairData`."""

    def __init__(self, student: Any, plan: Plan) -> None:
        self.student = student.to(plan.device).eval()  # for good: without dropout a run depends on its seed alone
        self.student.set_attn_implementation("eager")  # the faster one with a bias of distances, on CPU
        self._logits = TiedOutputLayer(self.student, plan)
        self._plan = plan

    def _examples(self, batch: Batch) -> tuple[Labels, Tensor]:
        """Returns labels, and final hidden states [n, hidden], of the learned positions."""
        assert isinstance(batch, PairBatch)
        device = self._plan.device
        sources, is_source = batch.sources.to(device), batch.is_source.to(device)
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=self._plan.bf16):
            encoded = self.student.encoder(input_ids=sources, attention_mask=is_source).last_hidden_state
            decoded = self.student.decoder(
                input_ids=batch.inputs.to(device),
                encoder_hidden_states=encoded,
                encoder_attention_mask=is_source,
                use_cache=False,
            ).last_hidden_state
        labels = Labels(batch.labels.own_ids.to(device), batch.labels.log_probs.to(device))
        return labels, decoded[batch.learned.to(device)]


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
