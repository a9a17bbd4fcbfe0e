"""A student: a small model of the target's architecture, started from chosen layers and the embeddings of the target.

Of an encoder-decoder target the layers are the decoder's: the student has the whole encoder.

With `draft_vocabulary_size` it knows only the tokens that the target uses most: token i of the student is token
`target_token_ids[i]` of the target, and all others are one more token, which it reads and never proposes.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.chat.template import TEMPLATE_FILES
from specdec.distill.texts import LabelledTexts
from specdec.engine.loading.fitting import class_of, config_of
from specdec.engine.loading.folder_files import write_manifest
from specdec.engine.loading.model_folder import ModelFolder
from specdec.engine.transformers_model import dtype_of, read_weights
from specdec.engine.vocabulary_map import VOCABULARY_FILE
from specdec.errors import ConfigError
from specdec.folders import has_file

LAYER_INDEX = re.compile(r"(.*\.(?:layers|h)\.|decoder\.block\.)(\d+)(\..*)")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    *TEMPLATE_FILES,
)
PER_LAYER = ("layer_types", "no_rope_layers")  # entries of a configuration with one value a layer
MLP_MULTIPLE = 64
DRAFT_VOCABULARY_MIN = 64


@dataclass(frozen=True, slots=True)
class StudentShape:
    """`hidden_size` 0: the target's. `target_layers`: those a student of the target's hidden size starts from; empty:
    the last, and the first ones before it. `draft_vocabulary_size` 0: the whole vocabulary."""

    layer_count: int
    hidden_size: int = 0
    target_layers: tuple[int, ...] = ()
    draft_vocabulary_size: int = 0


def most_used(texts: LabelledTexts, count: int, always: Sequence[int] = ()) -> Tensor:
    """Returns the ids the target uses most, by its probability along the texts, ascending.  # [count] int64

    `always` are among them. Fewer than `count` if the texts show fewer.
    """
    size = 1 + max(int(texts.likeliest_ids.max()), int(texts.token_ids.max()), *always)
    used = torch.zeros(size, dtype=torch.float64)
    used.index_add_(0, texts.likeliest_ids.flatten().long(), texts.log_probs.flatten().double().exp())
    used[list(always)] = torch.inf
    ids = used.topk(min(count, int((used > 0).sum()))).indices
    return ids.sort().values


def share_of(token_ids: Tensor, texts: LabelledTexts) -> float:
    """Returns the share of the target's own tokens in the answers of these texts that are among `token_ids`: an
    estimate of the target's probability that a draft with these tokens can reach."""
    every = zip(texts.token_ids.split(texts.lengths.tolist()), texts.answered_from.tolist())
    answers = torch.cat([own[answered_from + 1 :] for own, answered_from in every])
    return torch.isin(answers, token_ids.to(answers.dtype)).double().mean().item()


def layers_key(config: Any) -> str:
    """Returns the entry of a configuration with the number of layers that a student may have fewer of."""
    return "num_decoder_layers" if config.is_encoder_decoder else "num_hidden_layers"


def layer_count_of(config: Any) -> int:
    """Returns the target's number of such layers."""
    return int(getattr(config, layers_key(config)))


def student_config(target: Any, shape: StudentShape, vocabulary_size: int) -> Any:
    """Returns the target's configuration with the student's sizes. Raises ConfigError for impossible ones."""
    config = copy.deepcopy(target)
    setattr(config, layers_key(config), shape.layer_count)
    config.vocab_size = vocabulary_size
    if vocabulary_size != target.vocab_size:
        config.pad_token_id = None  # it is the target's, and a row of the embeddings would not be learned
    for name in PER_LAYER:
        if isinstance(values := getattr(config, name, None), list):
            setattr(config, name, [values[layer] for layer in chosen_layers(layer_count_of(target), shape)])
    if shape.hidden_size and shape.hidden_size != target.hidden_size:
        for name, value in _narrowed(target, shape.hidden_size).items():
            setattr(config, name, value)
    return config


def _narrowed(target: Any, hidden_size: int) -> dict[str, Any]:
    """Returns the sizes of a narrower model with heads of the same size, as many fewer as it is narrower."""
    head_size = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    kv_heads = getattr(target, "num_key_value_heads", None) or target.num_attention_heads
    groups = target.num_attention_heads // kv_heads
    share = hidden_size / target.hidden_size
    heads = groups * max(1, round(kv_heads * share))
    values = {"hidden_size": hidden_size, "num_attention_heads": heads}
    if hasattr(target, "head_dim"):
        values["head_dim"] = head_size
    multiple = heads if hasattr(target, "head_dim") else groups * head_size
    if hidden_size % multiple or hidden_size > target.hidden_size:
        limit = f"it must be a multiple of {multiple}, at most the target's {target.hidden_size}"
        raise ConfigError(f"--hidden-size is {hidden_size}; {limit}")
    if hasattr(target, "num_key_value_heads"):
        values["num_key_value_heads"] = heads // groups
    if wide := getattr(target, "intermediate_size", None):
        values["intermediate_size"] = max(1, round(wide * share / MLP_MULTIPLE)) * MLP_MULTIPLE
    return values


def check_shape(folder: ModelFolder, shape: StudentShape) -> None:
    """Raises ConfigError for a shape that a student of this target cannot have, before anything is computed."""
    if has_file(folder.path / VOCABULARY_FILE):
        raise ConfigError(f"--target {folder.path} has a part of its tokenizer's tokens: it can only be a draft")
    target = config_of(folder)
    chosen_layers(layer_count_of(target), shape)
    if folder.has_encoder:
        _check_keeps_encoder(target, shape)
    student_config(target, shape, shape.draft_vocabulary_size or target.vocab_size)
    if 0 < shape.draft_vocabulary_size < DRAFT_VOCABULARY_MIN:
        limit = f"it must be 0, for all tokens, or at least {DRAFT_VOCABULARY_MIN}"
        raise ConfigError(f"--draft-vocabulary is {shape.draft_vocabulary_size}; {limit}")


def _check_keeps_encoder(target: Any, shape: StudentShape) -> None:
    """Raises ConfigError for a shape without the encoder of an encoder-decoder target."""
    if shape.hidden_size not in (0, target.hidden_size):
        limit = f"it must be 0 or the target's {target.hidden_size}: a draft of an encoder-decoder has its encoder"
        raise ConfigError(f"--hidden-size is {shape.hidden_size}; {limit}")
    if shape.draft_vocabulary_size:
        limit = "it must be 0, for all tokens: a draft of an encoder-decoder reads whole inputs"
        raise ConfigError(f"--draft-vocabulary is {shape.draft_vocabulary_size}; {limit}")


def build_student(folder: ModelFolder, shape: StudentShape, token_ids: Tensor | None, seed: int) -> Any:
    """Returns a `transformers` model in float32 that starts from the target in `folder`.

    `token_ids`: the target's ids of the student's tokens, [tokens] int64; None: all. Raises ConfigError.
    """
    target = read_weights(str(folder.path), folder, folder.digest, dtype_of(folder.config, "auto"))
    size = target.config.vocab_size if token_ids is None else len(token_ids) + 1
    torch.manual_seed(seed)
    student = class_of(folder)(student_config(target.config, shape, size)).float()
    if folder.has_encoder and target.get_output_embeddings().weight is not target.get_input_embeddings().weight:
        student.lm_head.weight = torch.nn.Parameter(student.lm_head.weight.detach().clone())  # its class ties it always
    rows = torch.arange(size) if token_ids is None else torch.cat([token_ids, token_ids[:1]])
    with torch.no_grad():
        if student.config.hidden_size == target.config.hidden_size:
            _copy_weights(target, student, chosen_layers(layer_count_of(target.config), shape), rows)
        else:
            _copy_projected_embeddings(target, student, rows)
        if token_ids is not None:  # the token for all others begins as their mean
            own = student.get_input_embeddings().weight
            own[-1] = own[:-1].mean(0)
    return student.eval()  # for good: without dropout a run depends on its seed alone


def chosen_layers(layer_count: int, shape: StudentShape) -> tuple[int, ...]:
    """Returns the target's layers that a student starts from. Raises ConfigError for layers it does not have."""
    if shape.layer_count > layer_count:
        raise ConfigError(f"--layers is {shape.layer_count}; the target has {layer_count}")
    chosen = shape.target_layers or (*range(shape.layer_count - 1), layer_count - 1)
    if len(chosen) != shape.layer_count or not all(0 <= layer < layer_count for layer in chosen):
        raise ConfigError(
            f"--target-layers is {list(chosen)}; it must name {shape.layer_count} of 0 to {layer_count - 1}"
        )
    return chosen


def _copy_weights(target: Any, student: Any, layers: Sequence[int], rows: Tensor) -> None:
    """Copies everything but the layers that the student lacks; of embeddings and output layer the given rows."""
    source = target.state_dict()
    for name, own in student.state_dict().items():
        match = LAYER_INDEX.fullmatch(name)
        moved = f"{match[1]}{layers[int(match[2])]}{match[3]}" if match else name
        weight = source[moved if moved in source else name]  # T5's bias of distances stays the first layer's
        own.copy_(weight if weight.shape == own.shape else weight[rows])


def _copy_projected_embeddings(target: Any, student: Any, rows: Tensor) -> None:
    """Starts the embeddings as the target's, projected onto their principal directions."""
    table = target.get_input_embeddings().weight[rows].float()
    own = student.get_input_embeddings().weight
    width = min(own.shape[1], *table.shape)
    _, _, directions = torch.pca_lowrank(table, q=width, center=False)
    projected = table @ directions
    own[:, :width] = projected * (own.std() / projected.std())


def save_student(
    student: Any, target: ModelFolder, token_ids: Tensor | None, share: float, out: Path, facts: dict[str, Any]
) -> None:
    """Writes a model folder: bf16 weights, the target's tokenizer, the vocabulary map with its `share` of the target's
    tokens in held-out texts, and the facts of the run."""
    places: set[int] = set()
    state = {}
    for name, weight in student.state_dict().items():
        if weight.data_ptr() not in places:  # tied weights are stored once
            state[name] = weight.to(torch.bfloat16)
        places.add(weight.data_ptr())
    student.save_pretrained(out, state_dict=state)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = "bfloat16"
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (out / "model.safetensors").chmod(0o644)  # written readable by its owner alone
    for name in TOKENIZER_FILES:
        if (target.path / name).is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(target.path / name, out / name)
    (out / VOCABULARY_FILE).unlink(missing_ok=True)  # of an earlier draft
    if token_ids is not None:
        known = json.dumps({"target_token_ids": token_ids.tolist(), "share": share})
        (out / VOCABULARY_FILE).write_text(known + "\n", encoding="utf-8")
    write_manifest(out)
    write_facts(out, facts)


def write_facts(out: Path, facts: dict[str, Any]) -> None:
    """Writes the facts of a run beside its weights."""
    (out / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
