"""Single parts of a model by our own kernels, where no step of them serves the whole (`step_check`): its norms, its
matrix products, its output layer, and its attention with the write to the cache.

Parts are known by the classes of the modules that `modules.replace_modules` leaves. Each is tried at loading, in every
size that the model has, against what a library computes; one that raises or disagrees stays the library's, with one
line in the log. A row has the same bits in every step only where no operation of a library may mix rows, and rows of
extreme values had them: else a library keeps products of many rows, in which it is faster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.engine.attention import AttentionShape
from specdec.engine.cuda.attention import DENSE, DeviceMetadata
from specdec.engine.cuda.item_attention import ItemAttention, ItemMetadata
from specdec.engine.cuda.items import GROUP_ROWS
from specdec.engine.cuda.kernels.configs import head_tiles
from specdec.engine.cuda.kernels.launch import whole
from specdec.engine.cuda.kernels.norms import rms_norm
from specdec.engine.cuda.kernels.products import head, product
from specdec.engine.cuda.modules import DeviceOutput, DeviceRMSNorm
from specdec.engine.cuda.select import TOLERANCE, TRIED_STEPS, make_probe, tried_batch
from specdec.engine.cuda.step_check import (
    BLOCK_SIZE,
    PREFIX,
    WIDTHS,
    bits_are_equal,
    new_storage,
    planned,
    planned_for_modules,
    reason_of,
)
from specdec.engine.cuda.step_parts import UnknownPart
from specdec.engine.interface import RaggedBatch
from specdec.engine.linears import LinearProduct
from specdec.engine.norms import is_near

logger = logging.getLogger("specdec.engine")

Compute = Callable[[Any, Tensor], Tensor]  # of a module, for x [..., inputs]
TRIED_ROW_COUNT = 17  # more than a tile of a product has
# Operations of torch by which a row depends on one row of each argument, beside views and what it tags as pointwise.
BY_ROW = {"cat", "clone", "copy_", "detach_", "dropout", "embedding", "empty", "empty_like", "index_select"}
BY_ROW |= {"layer_norm", "native_layer_norm", "new_empty", "roll", "set_", "stack", "_to_copy"}


@dataclass(frozen=True, slots=True)
class KernelParts:
    """What kernels compute of a model: the names of its parts; its attention, if they do; whether a row has the same
    bits in every step."""

    names: tuple[str, ...]
    attention: ItemAttention | None
    has_equal_rows: bool


def kernel_parts(
    base: nn.Module,
    output: DeviceOutput,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    positions_max: int,
) -> KernelParts | None:
    """Has kernels compute the parts of a model for which they agree with the library; None if there are none."""
    norms = [module for module in base.modules() if isinstance(module, DeviceRMSNorm)]
    layers = [each for each in base.modules() if isinstance(each, LinearProduct) and each.weight.dtype == dtype]
    found: list[ItemAttention] = []
    parts: dict[str, Callable[[], None]] = {"attention": lambda: found.append(tried_attention(shape, dtype, device))}
    if norms:
        parts["norms"] = lambda: take(norms, dtype, norm_by_kernel)
    if layers:
        parts["products"] = lambda: take(layers, dtype, product_by_kernel)
    parts["output layer"] = lambda: take([output], dtype, output_kernel(output, dtype))
    names = tuple(name for name, attempt in parts.items() if is_taken(name, attempt))
    if not names:
        return None
    sizes = shape, dtype, device, positions_max
    try:
        is_equal = any(has_equal_bits(base, output, attention, *sizes) for attention in found)
    except Exception as error:  # of a model that takes no states in place of ids, of memory
        logger.warning("whether a row's bits depend on its step is not known: %s", reason_of(error))
        is_equal = False
    with_sums: list[Any] = [*layers, output]
    for module in () if is_equal else with_sums:
        module.compute = module.compute and of_few_rows(module.compute)
    return KernelParts(names, found[0] if found else None, is_equal)


def is_taken(name: str, attempt: Callable[[], None]) -> bool:
    """Whether kernels compute a part from now on; else a line in the log says why not."""
    try:
        attempt()
    except Exception as error:  # of Triton's compiler too, of a chip that lacks what a kernel needs
        logger.warning("kernels for %s are not used: %s", name, reason_of(error))
        return False
    return True


@torch.inference_mode()
def take(modules: Sequence[Any], dtype: torch.dtype, compute: Compute) -> None:
    """Has all these modules computed by a kernel. Raises, and takes none, if it raises or disagrees with the library on
    random rows; each size is tried once."""
    sizes: set[object] = set()
    for module in modules:
        buffers = dict(module.named_buffers(recurse=False))
        if not isinstance(module, DeviceOutput):
            for name, buffer in buffers.items():
                setattr(module, name, whole(buffer))
        size = tuple((name, buffer.shape, buffer.dtype) for name, buffer in buffers.items())
        if size not in sizes:
            expect_same(module, dtype, compute)
            sizes.add(size)
    for module in modules:
        module.compute = compute


def expect_same(module: Any, dtype: torch.dtype, compute: Compute) -> None:
    """Raises UnknownPart unless a kernel agrees with the library on random rows."""
    own = module.gain if isinstance(module, DeviceRMSNorm) else module.weight
    width = own.shape[0 if isinstance(module, DeviceOutput) else -1]
    rows = torch.randn(TRIED_ROW_COUNT, width, generator=torch.Generator().manual_seed(width))
    rows = rows.to(dtype).to(own.device)
    ours, theirs = compute(module, rows), module.by_library(rows)
    if not is_near(ours, theirs):
        off = float((ours.float() - theirs.float()).abs().max())
        raise UnknownPart(f"of {list(own.shape)} one is {off:.3g} off")


def norm_by_kernel(norm: DeviceRMSNorm, x: Tensor) -> Tensor:
    """As `DeviceRMSNorm`."""
    rows = whole(x.reshape(-1, x.shape[-1]))
    out = torch.empty_like(rows)
    rms_norm(rows, norm.gain, out, len(rows), norm.epsilon)
    return out.view(x.shape)


def product_by_kernel(layer: LinearProduct, x: Tensor) -> Tensor:
    """As `LinearProduct`."""
    rows = whole(x.reshape(-1, x.shape[-1]))
    out = rows.new_empty(len(rows), len(layer.weight))
    product(rows, layer.weight, out, len(rows), bias=layer.bias)
    return out.view(*x.shape[:-1], -1)


def output_kernel(output: DeviceOutput, dtype: torch.dtype) -> Compute:
    """Returns what computes an output layer as `DeviceOutput` does."""
    weight, bias = whole(output.weight.t().to(dtype)), None if output.bias is None else whole(output.bias)
    scale, softcap, (vocabulary, _) = output.scale, output.softcap, weight.shape

    def compute(_: DeviceOutput, x: Tensor) -> Tensor:
        count, tiles = len(x), head_tiles(vocabulary)
        logits, best = (x.new_empty(count, size, dtype=torch.float32) for size in (vocabulary, tiles))
        ids, is_finite = (x.new_empty(count, tiles, dtype=torch.int32) for _ in range(2))
        head(whole(x), weight, logits, best, ids, is_finite, count, bias=bias, scale=scale, softcap=softcap)
        return logits

    return compute


def of_few_rows(compute: Compute) -> Compute:
    """Returns what leaves many rows to the library."""
    return lambda module, x: (compute if x[..., 0].numel() <= GROUP_ROWS else type(module).by_library)(module, x)


@torch.inference_mode()
def tried_attention(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> ItemAttention:
    """Returns the attention of a model's layers. Raises UnknownPart if it disagrees with the plain way, or keys and
    values are not where they belong."""
    attention = ItemAttention(shape, device)
    attention.reserve(max(start + count for step in TRIED_STEPS for start, count in step))
    storage = make_probe(shape, BLOCK_SIZE, dtype, device).storage
    counts = [shape.head_count, shape.kv_head_count, shape.kv_head_count]
    for index, lengths in enumerate(TRIED_STEPS):
        batch = tried_batch(lengths, BLOCK_SIZE)
        rows = torch.randn(
            batch.row_count, sum(counts), shape.head_size, generator=torch.Generator().manual_seed(index)
        )
        queries, keys, values = rows.to(dtype).to(device).split(counts, 1)
        for rule in shape.rules:
            step = planned(attention, storage, batch)
            ours = ItemMetadata(attention, storage, step).attend(queries, keys, values, 0, rule)
            for own, cache in zip((keys, values), storage.slots[0]):
                if not torch.equal(own, cache.index_select(0, step.slots)):
                    raise UnknownPart("keys and values are not where they belong")
            plan = DeviceMetadata(storage, planned_for_modules(storage, batch), DENSE)
            off = float((ours.float() - plan.attend(queries, keys, values, 0, rule).float()).abs().max())
            if not off <= TOLERANCE:  # NaN too
                raise UnknownPart(f"it is {off:.3g} off")
    return attention


class OtherOperations(TorchDispatchMode):
    """Records the names of operations in which a row may depend on others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch says nothing of it
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0]
        if not (name in BY_ROW or function.is_view or torch.Tag.pointwise in function.tags):
            self.names.add(name)
        return function(*args, **(kwargs or {}))


@torch.inference_mode()
def has_equal_bits(
    base: nn.Module,
    output: nn.Module,
    attention: ItemAttention,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    positions_max: int,
) -> bool:
    """Whether a row has the same bits in every step: torch adds no numbers of a row but in norms, and rows of extreme
    values had them in steps of several widths. Not tried for a rank's share, of which all ranks run each step."""
    its: Any = base  # the method is of the architecture's class
    embedding = its.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        return False
    storage, others = new_storage(shape, dtype, device), OtherOperations()
    attention.reserve(PREFIX + max(WIDTHS) + 1)

    def logits_of(batch: RaggedBatch, rows: Tensor) -> Tensor:
        step = planned(attention, storage, batch)
        plan, positions = ItemMetadata(attention, storage, step), step.positions[None]
        with others:
            states = base(
                inputs_embeds=rows[None, : batch.row_count], position_ids=positions, use_cache=False, plan=plan
            ).last_hidden_state[0]
            logits: Tensor = output(states)
        return logits

    is_equal = bits_are_equal(logits_of, storage, embedding.weight, positions_max)
    if others.names:
        logger.info("a row's bits may depend on its step, by torch's %s", ", ".join(sorted(others.names)))
    return is_equal and not others.names
