"""A `transformers` causal language model behind the engine's interface.

The modules, weights and control flow are those of `transformers`; attention, matrix products and rotary tables are
ours (`attention`, `tiled_modules`), so that one forward takes any mix of sequences and a row's logits depend on its
own past only. The output layer and everything after it is float32.
"""

from __future__ import annotations

import torch
import transformers
from torch import nn

from specdec.engine import attention
from specdec.engine.attention import PagedStorage, probe_query_tiles
from specdec.engine.interface import ModelDescription, RaggedBatch, StepOutput
from specdec.engine.model_folder import ModelFolder, Progress
from specdec.engine.row_widths import ALONE, RowWidths
from specdec.engine.step_plan import StepPlanner
from specdec.engine.tiled_modules import TiledLinear, probe_widths, replace_modules, shorten_calls
from specdec.errors import ModelRefused


class TransformersModel:
    """A CausalModel over a proven `transformers` class. One thread at a time."""

    def __init__(self, model: transformers.PreTrainedModel, description: ModelDescription, dtype: torch.dtype):
        self.description = description
        config = model.config
        self._layer_count = config.num_hidden_layers
        self._head_count = config.num_attention_heads
        self._kv_head_count = getattr(config, "num_key_value_heads", None) or self._head_count
        self._head_size = getattr(config, "head_dim", None) or config.hidden_size // self._head_count
        self._base = model.base_model
        self._output = _output_layer(model, description.vocabulary_size)
        replace_modules(self._base, dtype, product_dtype(dtype), description.positions_max)
        self._linears = [module for module in self._base.modules() if isinstance(module, TiledLinear)] + [self._output]
        shorten_calls(self._base)
        self._storage: PagedStorage | None = None
        self._planner: StepPlanner | None = None
        self._thread_count = 0  # the one the planner is for
        self._families: dict[int, tuple[RowWidths, tuple[int, ...]]] = {}  # thread count -> row widths, query tiles

    @property
    def cache_bytes_per_position(self) -> int:
        return 2 * 4 * self._layer_count * self._kv_head_count * self._head_size  # keys and values, float32

    def allocate(self, block_count: int, block_size: int) -> PagedStorage:
        self._storage = PagedStorage(self._layer_count, block_count, self._kv_head_count, block_size, self._head_size)
        self._planner = None
        return self._storage

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> StepOutput:
        """Runs the batch; a row's logits are the same bits whatever else is in it."""
        if self._planner is None or self._thread_count != torch.get_num_threads():
            self._thread_count = torch.get_num_threads()
            self._planner = self._planner_in_force()
        plan = self._planner.plan(batch)
        hidden = self._base(
            input_ids=plan.input_ids, position_ids=plan.position_ids, use_cache=False, plan=plan.attention
        ).last_hidden_state[0]  # [padded rows, hidden]
        is_finite = torch.isfinite(hidden.sum(-1, dtype=torch.float32))  # [padded rows] bool
        if plan.logit_count:
            logits = self._output(hidden.index_select(0, plan.logit_rows))[: plan.logit_count]
            is_finite_logits = torch.isfinite(logits.sum(-1)).tolist()
        else:
            logits, is_finite_logits = torch.empty(0, self.description.vocabulary_size), []
        return StepOutput(logits, _per_segment(batch, is_finite.tolist(), is_finite_logits))

    @property
    def families(self) -> tuple[RowWidths, tuple[int, ...]]:
        """The row widths and query tiles for the thread count in force, measured once for each count."""
        thread_count = torch.get_num_threads()
        if thread_count not in self._families:
            tiles = probe_query_tiles(self._head_count // self._kv_head_count, self._head_size)
            is_native = self._linears[0].weight.dtype == torch.bfloat16
            widths = RowWidths(ALONE) if is_native and thread_count > 1 else probe_widths(self._linears)
            self._families[thread_count] = (widths, tiles or ALONE)
        return self._families[thread_count]

    def use_families(self, row_widths: RowWidths, query_tiles: tuple[int, ...]) -> None:
        """Replaces them by others, unmeasured: to measure what independence costs, or to try the last resort."""
        self._families[torch.get_num_threads()] = (row_widths, query_tiles)
        self._planner = None

    def _planner_in_force(self) -> StepPlanner:
        """Puts the families for the thread count in force: the library picks kernels by it."""
        if self._storage is None:
            raise RuntimeError("forward was called before allocate")
        widths, query_tiles = self.families
        for linear in self._linears:
            linear.set_widths(widths)
        return StepPlanner(self._storage, self._head_count, query_tiles, widths)


def load_transformers_model(
    name: str, folder: ModelFolder, dtype_name: str, progress: Progress | None = None
) -> TransformersModel:
    """Loads the weights of a checked folder. Raises ModelRefused where they do not fit the architecture."""
    digest = folder.digest(progress)
    if progress:
        progress("loading weights", 0.0)
    dtype = _dtype(folder.config, dtype_name)
    model_class = getattr(transformers, folder.config["architectures"][0])
    transformers.utils.logging.disable_progress_bar()
    try:
        model, report = model_class.from_pretrained(
            folder.path,
            dtype=dtype,
            attn_implementation=attention.NAME,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
        raise ModelRefused(f"{name}: {str(error).strip().splitlines()[0]}") from error
    if report["missing_keys"]:
        raise ModelRefused(f"{name}: the weights lack {sorted(report['missing_keys'])[0]}")
    model.eval().requires_grad_(False)
    loaded = TransformersModel(model, _describe(folder, model, dtype, digest), dtype)
    if progress:
        progress("loading weights", 1.0)
    return loaded


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of matrix products: bfloat16 only where the processor multiplies it natively, and on one thread.

    Elsewhere bfloat16 is emulated row by row; there the weights are kept in float32, which holds them exactly, and
    each product is rounded to bfloat16 once. Native products of several threads were seen to differ with a row's
    neighbours at widths that probing found equal (an Intel Xeon with AMX, two threads).
    """
    if dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported() and torch.get_num_threads() == 1:
        return torch.bfloat16
    return torch.float32


def _dtype(config: dict, dtype_name: str) -> torch.dtype:
    """The type of "auto" is the weights' own; float16, slow and narrow on a CPU, is widened to float32."""
    if dtype_name == "auto":
        dtype_name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return torch.bfloat16 if dtype_name == "bfloat16" else torch.float32


def _output_layer(model: transformers.PreTrainedModel, vocabulary_size: int) -> TiledLinear:
    """The output layer in float32, cut to the ids that have a string."""
    output = model.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise ModelRefused(f"an output layer of type {type(output).__name__} is not proven yet")
    bias = None if output.bias is None else output.bias.detach()[:vocabulary_size]
    return TiledLinear(output.weight.detach()[:vocabulary_size].t().float().contiguous(), bias, is_output=True)


def _describe(
    folder: ModelFolder, model: transformers.PreTrainedModel, dtype: torch.dtype, digest: str
) -> ModelDescription:
    output_width = model.get_output_embeddings().weight.shape[0]
    return ModelDescription(
        model_digest=digest,
        model_name=folder.path.resolve().name,
        vocabulary_size=min(folder.token_string_count, output_width),
        positions_max=model.config.max_position_embeddings,
        end_token_ids=folder.end_token_ids,
        dtype=str(dtype).removeprefix("torch."),
        device="cpu",
        libraries=f"torch {torch.__version__}, transformers {transformers.__version__}",
    )


def _per_segment(batch: RaggedBatch, rows: list[bool], logit_rows: list[bool]) -> tuple[bool, ...]:
    """Whether all rows of each segment, and all its logits, are finite."""
    flags: list[bool] = []
    row = logit_row = 0
    for segment in batch.segments:
        row_end, logit_end = row + len(segment.token_ids), logit_row + segment.logit_count
        flags.append(all(rows[row:row_end]) and all(logit_rows[logit_row:logit_end]))
        row, logit_row = row_end, logit_end
    return tuple(flags)
