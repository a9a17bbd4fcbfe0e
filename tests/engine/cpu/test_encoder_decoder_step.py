"""A step of an encoder-decoder model in a native call for each stack has the bits of its modules, one kernel each.

As `test_step.py`; that the answers are those of `transformers` is tested with the same calls in
tests/engine/test_encoder_decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn

from specdec.engine.cpu.encoder_decoder_call import StackCalls
from specdec.engine.cpu.kernels import kernels
from specdec.engine.cpu.plan import plan_step
from specdec.engine.interface import Chunk, RaggedBatch, StepAbandoned, StepFlag, tree_paths
from specdec.engine.loading.model import load_model
from specdec.engine.transformers_model import TransformersModel
from tests.support.encoder_decoder_models import KINDS, START
from tests.support.engine_models import random_tokens

BLOCK_COUNT, BLOCK_SIZE = 40, 16
LEFT, RIGHT, LONG = (3, 1, 7, 2, 30, 31), (5, 9, 4), tuple(range(10, 28))  # blocks of three sequences
PARENTS = (0, 1, 1, 0, 2, 5, 4)

pytestmark = pytest.mark.skipif(kernels() is None, reason="native kernels are off")
FolderOf = Callable[[str], Path]


def same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return left.shape == right.shape and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def load(folder: Path, dtype: str = "float32", has_call: bool = True) -> TransformersModel:
    """A model with zeroed storage, whose hidden states are asked for."""
    model = load_model(str(folder), dtype)
    assert isinstance(model, TransformersModel)
    if not has_call:
        model.backend._call = None
    model.allocate(BLOCK_COUNT, BLOCK_SIZE)
    model.return_hidden()
    return model


def batches() -> Iterator[tuple[Chunk, ...]]:
    """Steps that each see what the ones before wrote: inputs with and without a beginning, encoders beside decodes and
    verifications, trees in place and not, a long input and output."""
    left, right = random_tokens(33, 1), random_tokens(16, 2)
    yield (Chunk(LEFT, 0, [*left, START], 1, (), 33), Chunk(RIGHT, 0, right, 0, (), 16))
    yield (Chunk(RIGHT, 16, [START, *random_tokens(4, 3)], 5, (), 16), Chunk(LEFT, 34, [9], 1, (), 33))
    output = [START, *random_tokens(69, 4)]
    yield (
        Chunk(LEFT, 35, [5, 6], 2, (), 33),
        Chunk(LONG, 0, [*random_tokens(150, 5), *output], 70, (), 150),
        Chunk(RIGHT, 21, [8], 1, (), 16),
    )
    yield (
        Chunk(LEFT, 37, random_tokens(7, 6), 7, tree_paths(PARENTS, 37), 33),
        Chunk(LONG, 220, [1, 2, 3], 2, (), 150),
    )
    moved = [[cell + 40 for cell in path] for path in tree_paths(PARENTS, 37)]
    yield (Chunk(LEFT, 37, random_tokens(7, 6), 3, moved, 33),)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_calls_have_the_bits_of_the_modules(kind: str, dtype: str, folder_of: FolderOf) -> None:
    """Claim: logits, hidden states, flags and caches of inputs, mixed steps and trees have the bits of `transformers`'
    control flow over one kernel a module, on one thread and on two.

    Conclusive: every bit is compared, and an operation that is left out, moved or rounded elsewhere changes most.
    """
    for threads in (1, 2):
        torch.set_num_threads(threads)
        model, modules = load(folder_of(kind), dtype), load(folder_of(kind), dtype, has_call=False)
        assert isinstance(model.backend._call, StackCalls)
        for chunks in batches():
            ours, theirs = (each.forward(RaggedBatch(chunks)) for each in (model, modules))
            assert same(ours.logits, theirs.logits)
            assert ours.hidden is None or theirs.hidden is None or same(ours.hidden, theirs.hidden)
            assert (ours.hidden is None) == (theirs.hidden is None) and all(ours.is_finite) and all(theirs.is_finite)
        storage, other = model.backend._storage, modules.backend._storage
        for mine, its in zip((*storage.keys, *storage.values), (*other.keys, *other.values), strict=True):
            assert mine.any() and same(mine, its)


def test_inputs_alone_have_no_logits(folder_of: FolderOf) -> None:
    """Claim: a step of encoders' rows alone has no logits, a flag a chunk, and cells that a later step uses.

    Conclusive: that step's logits are those of a step of both; a not-a-number in one input fails its chunk alone.
    """
    model, tokens = load(folder_of("t5-gated")), random_tokens(30, 1)
    whole = model.forward(RaggedBatch((Chunk(LEFT, 0, [*tokens, START, 5], 2, (), 30),))).logits
    chunks = Chunk(RIGHT, 0, tokens[:9], 0, (), 9), Chunk(LONG, 0, tokens, 0, (), 30)
    alone = model.forward(RaggedBatch(chunks))
    assert alone.logits.shape == (0, whole.shape[1]) and list(alone.is_finite) == [True, True]
    assert same(model.forward(RaggedBatch((Chunk(LONG, 30, [START, 5], 2, (), 30),))).logits, whole)
    model._base.encoder.embedding.weight.data[tokens[20]] = float("nan")
    assert tokens[20] not in tokens[:9]
    assert list(model.forward(RaggedBatch(chunks)).is_finite) == [True, False]


def test_a_set_flag_abandons_either_stack_before_it_writes(folder_of: FolderOf) -> None:
    """Claim: a flag that is set ends the encoders' call and the decoder's before any cell is written.

    Conclusive: all bits of the cache are compared; the same steps without the flag change them.
    """
    model, flag = load(folder_of("t5")), StepFlag()
    storage = model.backend._storage
    steps = Chunk(LEFT, 0, random_tokens(20, 1), 0, (), 20), Chunk(LEFT, 20, [START], 1, (), 20)
    for chunk in steps:
        before = [cells.clone() for cells in (*storage.keys, *storage.values)]
        flag.set(True)
        with pytest.raises(StepAbandoned):
            model.forward(RaggedBatch((chunk,), flag))
        assert all(map(same, (*storage.keys, *storage.values), before))
        flag.set(False)
        model.forward(RaggedBatch((chunk,), flag))
        assert not any(map(same, (*storage.keys, *storage.values), before))


def test_rows_without_an_input_are_refused(folder_of: FolderOf) -> None:
    """Claim: the decoder's call refuses rows of which one sees from position 0 on, and so has no cross attention.

    Conclusive: rows without first positions and with one of 0 among others; with 1 instead the same rows run.
    """
    model = load(folder_of("t5"))
    calls, native = model.backend._call, kernels()
    assert native is not None and isinstance(calls, StackCalls)
    chunk = Chunk(LEFT, 5, [4, 5], 2, (), 5)
    plan = plan_step(RaggedBatch((chunk,)), BLOCK_SIZE)
    ids, logit_rows = plan.input_ids, plan.logit_rows
    for first in (None, [1, 0], [1, 1]):
        arrays = plan.rows._replace(first=None if first is None else numpy.array(first, numpy.int32))
        rows = native.rows(block_count=BLOCK_COUNT, block_size=BLOCK_SIZE, **arrays._asdict())
        if first == [1, 1]:
            assert calls.decoder.step(rows, ids, logit_rows).is_finite.all()
        else:
            with pytest.raises(ValueError, match="first of a row is 0; it must be 1 or more"):
                calls.decoder.step(rows, ids, logit_rows)


def test_modules_with_an_unknown_operation_have_no_call(folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: modules of known names that compute anything else, in either stack, have no call; they serve.

    Source: a later release of `transformers` may change a forward. Conclusive: one layer scales its result by 1.001,
    which no part shows: the first or the last of three of the encoder, or of two of the decoder.
    """
    kind = type(load(folder_of("t5"))._base.encoder.layers[0].feed_forward)
    its_forward = kind.forward
    for changed in (1, 3, 4, 5):  # in the order in which they run
        calls: list[nn.Module] = []

        def forward(self: nn.Module, x: Tensor, calls: list[nn.Module] = calls, changed: int = changed) -> Tensor:
            calls.append(self)
            result: Tensor = its_forward(self, x)
            return result * 1.001 if len(calls) == changed else result

        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", forward)
            assert load_model(str(folder_of("t5"))).backend._call is None
        assert len(calls) == 5
    assert load(folder_of("t5")).backend._call is not None
