"""Whether a step of our own kernels serves a model: tried at loading, against the model's modules and against itself.

Every layer runs on the states that entered its module, so that a wrong part shows at any depth and roundings do not add
up. Then rows of extreme values run in steps of several widths: whether a row's bits depend on the width is a part of
the numerics profile. A step that raises or disagrees is replaced by the modules, with one line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from specdec.engine.attention import AttentionShape
from specdec.engine.backend import Asked
from specdec.engine.cuda.attention import DENSE, DeviceMetadata
from specdec.engine.cuda.item_attention import ItemAttention
from specdec.engine.cuda.kernels import launch
from specdec.engine.cuda.plan import StepBuffer, StepTensors, exact_shape
from specdec.engine.cuda.step import DeviceStep
from specdec.engine.cuda.step_parts import ModelParts, UnknownPart, model_parts
from specdec.engine.cuda.step_plan import ItemBuffer, ItemTensors, shape_of
from specdec.engine.cuda.storage import DeviceStorage
from specdec.engine.eagle.features import states_entering
from specdec.engine.interface import Chunk, RaggedBatch

logger = logging.getLogger("specdec.engine")

TOKEN_COUNT = 8  # compared with the modules
BLOCK_SIZE = 16
PREFIX = 120  # positions before the rows of several widths: they cross the border of a split
WIDTHS = (17, 16, 8, 5, 2, 1)
TOLERANCE = 0.05  # of what a layer adds: roundings of 16 bits differ by a hundredth, a wrong part by far more
RESIDUAL = 0.125  # of the residual's rounding, as a part of TOLERANCE: 2^-9 of bfloat16 is then a third of it


def device_step(
    base: nn.Module,
    output: nn.Module,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    positions_max: int,
) -> DeviceStep | None:
    """Returns the step of a model whose modules are replaced, which no longer work then; None if these are to serve."""
    try:
        return tried(base, model_parts(base, output, shape, dtype), output, device, positions_max)
    except Exception as error:  # of Triton's compiler too, of a chip that lacks what a kernel needs
        logger.warning("a step of %s runs module by module: %s", type(base).__name__, reason_of(error))
    return None


def have_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a model of a type may be computed by our own kernels on a device."""
    is_known = dtype != torch.float32 and device.type == ("cpu" if launch.is_interpreted() else "cuda")
    return is_known and launch.can_start()


def reason_of(error: Exception) -> str:
    """Returns the first line of what is wrong with a part."""
    first = (str(error).strip() or "no reason given").splitlines()[0]
    return first if isinstance(error, UnknownPart) else f"{type(error).__name__}: {first}"


@torch.inference_mode()
def tried(
    base: nn.Module, parts: ModelParts, output: nn.Module, device: torch.device, positions_max: int
) -> DeviceStep:
    """Returns the step of these parts. Raises UnknownPart if it disagrees with the modules, which then work again."""
    storage = new_storage(parts.shape, parts.table.dtype, device)
    count = min(TOKEN_COUNT, positions_max)
    ids = torch.arange(count) % len(parts.table)
    batch = RaggedBatch((Chunk(range(1, storage.block_count), 0, ids.tolist(), count),))
    states, hidden = run_modules(base, storage, batch)
    logits = output(hidden)
    parts.alternate()
    try:
        call = DeviceStep(parts)
        call.attention.reserve(PREFIX + max(WIDTHS) + 1)
        compare(call, storage, planned(call.attention, storage, batch), states, hidden, logits)
        call.has_equal_rows = has_equal_rows(call, storage, positions_max)
    except BaseException:
        parts.restore()
        raise
    return call


def new_storage(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> DeviceStorage:
    """Returns a small storage for every layer. Blocks but the zero block hold random numbers."""
    blocks = 1 + -(-(PREFIX + max(WIDTHS)) // BLOCK_SIZE)
    sizes = shape.layer_count, blocks, BLOCK_SIZE, shape.kv_head_count, shape.head_size
    storage = DeviceStorage(*sizes, dtype, device)
    generator = torch.Generator().manual_seed(0)
    for layer in storage.layers:
        layer[:, 1:] = torch.randn(layer[:, 1:].shape, generator=generator).to(layer)
    return storage


def run_modules(base: nn.Module, storage: DeviceStorage, batch: RaggedBatch) -> tuple[list[Tensor], Tensor]:
    """Returns the states that enter each layer, then those that leave the last, and the last norm of these, by the
    modules.  # [rows, hidden] each"""
    step = planned_for_modules(storage, batch)
    count = len(storage.layers)
    with states_entering(base, range(count + 1)) as found:
        hidden = base(
            input_ids=step.input_ids[None],
            position_ids=step.positions[None],
            use_cache=False,
            plan=DeviceMetadata(storage, step, DENSE),
        ).last_hidden_state[0]
    return [found[layer_id][0] for layer_id in range(count + 1)], hidden


def planned_for_modules(storage: DeviceStorage, batch: RaggedBatch) -> StepTensors:
    """Returns the tensors of a batch as attention of a library takes them."""
    buffer, shape = StepBuffer(storage.block_size, storage.scratch_slot, storage.layers[0].device), exact_shape(batch)
    buffer.reserve(shape)
    buffer.fill(batch, shape)
    return buffer.send(shape)


def planned(attention: ItemAttention, storage: DeviceStorage, batch: RaggedBatch) -> ItemTensors:
    """Returns the tensors of a batch as our own attention takes them."""
    buffer, shape = ItemBuffer(attention.layout(storage), storage.layers[0].device), shape_of(batch)
    buffer.reserve(shape)
    buffer.fill(batch, shape)
    return buffer.send(shape)


def compare(
    call: DeviceStep, storage: DeviceStorage, step: ItemTensors, states: list[Tensor], hidden: Tensor, logits: Tensor
) -> None:
    """Raises UnknownPart unless each layer, the last norm and the output layer agree with the modules' results, and the
    whole step begins with their embeddings."""
    for index, layer in enumerate(call.parts.layers):
        its = call.rows_from(states[index])
        call.run_layer(layer, storage.slots[index], step, its)
        expect_near(f"layer {index}", its.hidden[: len(hidden)], states[index + 1], states[index])
    result = call.finish(states[-1])
    assert result.hidden is not None
    expect_near("the last norm", result.hidden, hidden)
    expect_near("the output layer", result.logits, logits)
    whole = call.run(storage, step, step.input_ids, step.logit_rows, Asked(feature_layers=(0,)))
    assert whole.features is not None
    expect_near("the embedding", whole.features, states[0])


def expect_near(what: str, ours: Tensor, theirs: Tensor, before: Tensor | None = None) -> None:
    """Raises UnknownPart unless rows agree but for roundings. `before`: the residual that both add to."""
    ours, theirs = ours.float(), theirs.float()
    added = theirs if before is None else theirs - before.float()
    scale = added.norm(dim=1) + (0 if before is None else RESIDUAL * theirs.norm(dim=1))
    off = float(((ours - theirs).norm(dim=1) / scale).max())
    if not off <= TOLERANCE:  # NaN too
        raise UnknownPart(f"{what} is {off:.3g} off")


def has_equal_rows(call: DeviceStep, storage: DeviceStorage, positions_max: int) -> bool:
    """Whether rows have the same bits in steps of all widths: see `bits_are_equal`."""
    parts, table = call.parts, call.parts.table

    def logits_of(batch: RaggedBatch, rows: Tensor) -> Tensor:
        parts.table = rows
        step = planned(call.attention, storage, batch)
        return call.run(storage, step, step.input_ids, step.logit_rows, Asked(hidden=True)).logits

    try:
        return bits_are_equal(logits_of, storage, table, positions_max)
    finally:
        parts.table = table


def bits_are_equal(
    logits_of: Callable[[RaggedBatch, Tensor], Tensor], storage: DeviceStorage, table: Tensor, positions_max: int
) -> bool:
    """Whether rows of extreme values have the same bits in steps of all WIDTHS, behind a prefix of random keys.

    `logits_of(batch, rows)`: a step's logits, with `rows` [ids, hidden] in place of the model's `table`.
    """
    widths = [width for width in WIDTHS if width <= positions_max]
    start = min(PREFIX, positions_max - widths[0])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(widths[0], table.shape[1], generator=generator) * torch.logspace(-3, 3, widths[0])[:, None]
    rows = rows.to(table)
    found: list[Tensor] = []
    for width in widths:
        batch = RaggedBatch((Chunk(range(1, storage.block_count), start, range(width), width),))
        found.append(logits_of(batch, rows).view(torch.int32).clone())
    return all(torch.equal(each, found[0][: len(each)]) for each in found)
