"""A `transformers` causal language model behind the engine's interface.

Weights and control flow are those of `transformers`; attention, rotary tables and most modules are the backend's, so
that one forward takes any mix of sequences and a row's logits depend on its own past only. The logits and all later
computation are float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from torch.utils.hooks import RemovableHandle

from specdec.engine import attention
from specdec.engine.attention import AttentionShape, measure_shape
from specdec.engine.backend import Asked, Backend, StepInput, StepResult
from specdec.engine.cpu.backend import CpuBackend
from specdec.engine.cpu.kernels import kernels
from specdec.engine.cpu.llama_parts import PackedEmbedding
from specdec.engine.eagle.features import keep_states
from specdec.engine.encoder_decoder import EncoderDecoder
from specdec.engine.interface import ModelDescription, RaggedBatch, StepOutput, Storage
from specdec.engine.loading.architectures import architecture_of
from specdec.engine.loading.config_check import served_positions
from specdec.engine.loading.encoder_decoder import (
    check_encoder_decoder,
    encoder_positions,
    served_pair_positions,
    without_warning_of_ties,
)
from specdec.engine.loading.fitting import check_weights, class_of, config_of, empty_model
from specdec.engine.loading.model_folder import (
    ModelFolder,
    Progress,
    end_tokens_of,
    no_progress,
    tokenizer_facts,
    warn_of_unknown_ends,
)
from specdec.engine.loading.weights import fill, unpacked
from specdec.engine.packed import PackedLinear, PackedWeight
from specdec.engine.retokenizer import Retokenizer
from specdec.engine.vocabulary_map import VOCABULARY_FILE, VocabularyMap
from specdec.errors import ModelRefused, refusing
from specdec.folders import tokenizer_file

if TYPE_CHECKING:
    from specdec.engine.parallel.modules import JoinedShare

logger = logging.getLogger("specdec.engine")

CPU = torch.device("cpu")
NUMERICS_VERSION = 3  # increases with each change by which a model's results have other bits


class TransformersModel:
    """A CausalModel over a supported `transformers` class, or one rank's share of it. One thread at a time.

    `backend`: of its device.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        description: ModelDescription,
        backend: Backend,
        share: JoinedShare | None = None,
    ):
        self.description = description
        vocabulary = self._vocabulary = description.vocabulary
        self.backend = backend
        columns = vocabulary.columns if vocabulary else torch.arange(description.vocabulary_size)
        output = output_layer(model, columns[: share.vocabulary_part] if share else columns, self.backend)
        self.hidden_size: int = model.get_output_embeddings().in_features
        self.asked = Asked()
        self._states: dict[int, torch.Tensor] = {}  # that enter layers in the last run of the modules
        self._hooks: list[RemovableHandle] = []  # that keep them
        self._base, shape = base_of(model, description)
        self.backend.replace_modules(self._base)
        self._output: nn.Module = output
        if share:
            share.join(self._base)
            self._output = share.whole_output(output, description.vocabulary_size)
        ids_end = int(vocabulary.own_ids.max()) + 1 if vocabulary else description.vocabulary_size
        shape = shape or measure_shape(self._base, self.backend.device)
        self.layer_count = shape.layer_count
        self.backend.attach(self._base, output, shape, ids_end)
        if numerics := self.backend.numerics:
            libraries = f"{description.libraries}, {numerics}"
            self.description = replace(description, libraries=libraries, kernels=numerics)

    @property
    def cache_bytes_per_position(self) -> int:
        return self.backend.cache_bytes_per_position

    @property
    def product_bytes(self) -> int:
        """Bytes of the weights of all matrix products, which every step reads."""
        return self.backend.product_bytes

    def allocate(self, block_count: int, block_size: int) -> Storage:
        return self.backend.allocate(block_count, block_size)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> StepOutput:
        """Runs the batch. On a CPU the bits of a target's row do not depend on the rest of the batch."""
        return self.backend.run(batch, self._compute)

    def return_hidden(self) -> nn.Module:
        """See `HiddenStates`."""
        self.asked.hidden = True
        return self._output

    def return_features(self, layer_ids: Sequence[int]) -> None:
        """See `Features`."""
        if self.description.has_encoder:
            raise ModelRefused("an encoder-decoder model gives no features")
        for hook in self._hooks:
            hook.remove()
        self._hooks = keep_states(self._base, layer_ids, self._states)
        self.asked.feature_layers = tuple(layer_ids)

    def load_embedding(self) -> torch.Tensor | nn.Module:
        """See `Features`."""
        its: Any = self._base
        embedding: PackedEmbedding | nn.Embedding = its.get_input_embeddings()
        return embedding if isinstance(embedding, PackedEmbedding) else embedding.weight.detach()

    def _compute(self, step: StepInput) -> StepResult:
        input_ids = self._vocabulary.own(step.input_ids) if self._vocabulary else step.input_ids
        if step.whole:
            result = step.whole.run(input_ids, step.logit_rows, self._output, self.asked)
        else:
            result = self._by_modules(input_ids, step)
        if self._vocabulary is None:
            return result
        return replace(result, logits=self._vocabulary.spread(result.logits), best_ids=None)

    def _by_modules(self, input_ids: torch.Tensor, step: StepInput) -> StepResult:
        hidden = self._base(
            input_ids=input_ids, position_ids=step.position_ids, use_cache=False, plan=step.plan
        ).last_hidden_state[0]  # [rows, hidden]
        chosen = None
        if len(step.logit_rows):
            chosen = hidden.index_select(0, step.logit_rows)
            logits = self._output(chosen)
        else:
            width = self._vocabulary.own_size if self._vocabulary else self.description.vocabulary_size
            logits = hidden.new_empty(0, width, dtype=torch.float32)
        is_finite = self.backend.finite(hidden, logits)
        states = [self._states.pop(layer_id)[0] for layer_id in self.asked.feature_layers]
        features = torch.cat(states, -1) if states else None
        return StepResult(logits, is_finite, chosen if self.asked.hidden else None, features)

    def counters(self) -> dict[str, float]:
        """Device statistics for the log when serving ends; may wait for the device."""
        return self.backend.counters()


def base_of(
    model: transformers.PreTrainedModel, description: ModelDescription
) -> tuple[nn.Module, AttentionShape | None]:
    """Returns the base model that takes a step's rows, and its shape if that is not to be measured."""
    if not description.has_encoder:
        return model.base_model, None
    base = EncoderDecoder(model, description.positions_max)
    return base, base.shape


def load_transformers_model(
    name: str,
    folder: ModelFolder,
    digest: Callable[[], str],
    dtype_name: str,
    device: torch.device = CPU,
    enforce_eager: bool = False,
    has_stable_rows: bool = True,
    target_tokenizer: str = "",
    positions_max: int | None = None,
    progress: Progress = no_progress,
    dependent_launch: bool = True,
) -> TransformersModel:
    """Loads the weights of a checked folder; `digest` returns its digest, or raises what is wrong with its files.
    `positions_max`, `progress`: see `load_model`.

    Raises ModelRefused if the weights do not fit the architecture.
    """
    dtype = dtype_of(folder.config, dtype_name)
    if folder.has_encoder:
        check_encoder_decoder(name, dtype, device)
        positions_max = served_pair_positions(folder.config, positions_max)
    else:
        positions_max = served_positions(name, config_of(folder).max_position_embeddings, positions_max)
    keeps_packed = device.type == "cpu" and not folder.has_encoder
    model = read_weights(name, folder, digest, dtype, attention.NAME, keeps_packed, progress)
    with refusing(name):
        model.eval().requires_grad_(False).to(device)
    vocabulary = VocabularyMap.read(folder.path, folder.token_string_count, _output_width(model))
    if target_tokenizer:
        vocabulary = map_tokenizers(target_tokenizer, folder, _output_width(model), vocabulary)
    if vocabulary and has_stable_rows:
        raise ModelRefused(f"{name} has a part of its tokenizer's tokens ({VOCABULARY_FILE}): it can only be a draft")
    vocabulary = vocabulary and vocabulary.to(device)
    description = describe(folder, model, dtype, digest(), positions_max, device, vocabulary)
    backend = backend_for(device, dtype, positions_max, enforce_eager, has_stable_rows, dependent_launch)
    with refusing(name):
        return TransformersModel(model, description, backend)


def read_weights(
    name: str,
    folder: ModelFolder,
    digest: Callable[[], str],
    dtype: torch.dtype,
    attention_name: str | None = None,
    keeps_packed: bool = False,
    progress: Progress = no_progress,
) -> transformers.PreTrainedModel:
    """Returns the model of a checked folder as `transformers` has it; `attention_name`: of its attention, absent: the
    library's choice. `keeps_packed`: see `fill`. `digest`: see
    `load_transformers_model`. Raises ModelRefused."""
    transformers.utils.logging.disable_progress_bar()
    try:
        if folder.packed and keeps_packed:
            model = empty_model(name, folder, dtype)
            fill(name, model, folder, {}, progress, keeps_packed=True)
            return model
        check_weights(name, empty_model(name, folder, dtype), folder)
        with refusing(name), without_warning_of_ties() if folder.has_encoder else nullcontext():
            model, report = class_of(folder).from_pretrained(
                None if folder.packed else folder.path,
                state_dict=unpacked(folder.packed) if folder.packed else None,
                config=config_of(folder),
                generation_config=transformers.GenerationConfig(),  # unused: the folder's is not read again
                dtype=dtype,
                attn_implementation=attention_name,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        if report["missing_keys"]:
            raise ModelRefused(f"{name}: the weights lack {sorted(report['missing_keys'])[0]}")
    except ModelRefused:
        folder.check_manifest(digest)
        raise
    read: transformers.PreTrainedModel = model
    return read


def backend_for(
    device: torch.device,
    dtype: torch.dtype,
    positions_max: int,
    enforce_eager: bool,
    has_stable_rows: bool,
    dependent_launch: bool = False,
    agree: Callable[[bool], bool] = bool,
) -> Backend:
    """Returns the backend of a device for one model; on a GPU `enforce_eager`: no captured graphs. `dependent_launch`
    and `agree`: see `DeviceBackend`."""
    if device.type == "cpu":
        return CpuBackend(dtype, positions_max)
    from specdec.engine.cuda.backend import DeviceBackend

    return DeviceBackend(
        device,
        dtype,
        positions_max,
        not enforce_eager,
        has_trees=not has_stable_rows,
        tries_dependent=dependent_launch,
        agree=agree,
    )


def dtype_of(config: dict[str, Any], dtype_name: str) -> torch.dtype:
    """Returns the type of a name; "auto" is the weights' own, float32 if they have another than these."""
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype_name == "auto":
        return types.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
    return types[dtype_name]


def output_layer(model: transformers.PreTrainedModel, columns: torch.Tensor, backend: Backend) -> nn.Module:
    """Returns the output layer in float32, for these ids, with the architecture's scaling of logits."""
    output = model.get_output_embeddings()
    count = len(columns)
    chosen = slice(count) if columns[-1] == count - 1 else columns  # a view, if they are the first ones
    weight: torch.Tensor | PackedWeight
    if isinstance(output, PackedLinear):
        weight = output.read().chosen(chosen)
    elif isinstance(output, nn.Linear):
        weight = output.weight.detach()[chosen]
    else:
        raise ModelRefused(f"an output layer of type {type(output).__name__} is not supported")
    bias = None if output.bias is None else output.bias.detach()[chosen]
    return backend.output_layer(weight, bias, *logit_scaling(model))


def logit_scaling(model: transformers.PreTrainedModel) -> tuple[float, float | None]:
    """Returns the factor of the architecture's logits, and the value they are capped at, if any."""
    architecture = architecture_of(type(model).__name__, {"architectures": [type(model).__name__]})

    def value(key: str | None, default: float | None) -> Any:
        return default if key is None else getattr(model.config, key)

    factor, divisor = value(architecture.logit_factor_key, 1.0), value(architecture.logit_divisor_key, 1.0)
    factor = (factor or 1.0) / (divisor or 1.0)
    if value(architecture.logit_width_key, False):
        factor *= model.config.hidden_size**-0.5
    return factor, value(architecture.logit_softcap_key, None)


def map_tokenizers(
    target: str, draft: ModelFolder, output_width: int, fewer: VocabularyMap | None
) -> VocabularyMap | None:
    """Returns the map of a draft to another tokenizer; `fewer` if that is its own. Raises ModelRefused."""
    file, own_file = tokenizer_file(target), draft.path / "tokenizer.json"
    facts = tokenizer_facts(file)
    if facts.fingerprint == draft.tokenizer.fingerprint:
        return fewer
    ends = end_tokens_of(file.parent, {}, facts.size).ids
    with refusing(f"{file} and {own_file}"):
        return VocabularyMap.by_strings(Retokenizer(file, own_file, ends, draft.end_token_ids), output_width, fewer)


def _output_width(model: transformers.PreTrainedModel) -> int:
    width: int = model.get_output_embeddings().out_features
    return width


def describe(
    folder: ModelFolder,
    model: transformers.PreTrainedModel,
    dtype: torch.dtype,
    digest: str,
    positions_max: int,
    device: torch.device = CPU,
    vocabulary: VocabularyMap | None = None,
) -> ModelDescription:
    """Describes a model in a folder; reads only the configuration and shapes of the model. Warns of end tokens that it
    does not have."""
    native = kernels() if device.type == "cpu" else None
    output_width = vocabulary.size if vocabulary else _output_width(model)
    string_count = vocabulary.size if vocabulary else folder.token_string_count
    packed = f", weights {folder.packed.format}" if folder.packed else ""
    ends = folder.ends if vocabulary else folder.ends.below(output_width)
    warn_of_unknown_ends(folder.path, ends, min(string_count, output_width))
    if string_count > output_width:
        what = "tokenizer.json has %d token ids, the model %d: text with one of the others is refused"
        logger.warning(f"%s: {what}", folder.path, string_count, output_width)
    return ModelDescription(
        model_digest=digest,
        model_name=folder.path.resolve().name,
        vocabulary_size=min(string_count, output_width),
        positions_max=positions_max,
        end_token_ids=ends.ids,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}",
        libraries=f"{numerics_of(device)}, torch {torch.__version__}, transformers {transformers.__version__}{packed}",
        vocabulary=vocabulary,
        kernels=f"{native.family} {native.instructions}" if native else "",
        beginning_token_ids=folder.beginning,
        encoder_positions_max=encoder_positions(folder.config, positions_max) if folder.has_encoder else 0,
    )


def numerics_of(device: torch.device) -> str:
    """Names what decides the bits of a model's results on a device, beside its libraries: on a CPU the kernels, without
    them the number of threads."""
    engine = f"engine {NUMERICS_VERSION}"
    if device.type != "cpu":
        return engine
    own = kernels()
    if own is None:
        return f"{engine}, no kernels, {torch.get_num_threads()} threads"
    return f"{engine}, kernels {own.version} {own.family} {own.fingerprint}"
