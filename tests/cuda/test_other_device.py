"""A whole step on a device other than the host, checked for shapes, types and devices.

Tensors on the meta device hold no numbers, but have shapes, types and a device, and every operation is watched: one
that meets a tensor left on the host would raise on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec.engine import attention, norms, rotary_attention
from specdec.engine.cuda import backend as backend_module
from specdec.engine.cuda import modules
from specdec.engine.cuda.attention import DENSE, AttentionBackend
from specdec.engine.cuda.backend import DeviceBackend
from specdec.engine.cuda.select import candidates
from specdec.engine.interface import Chunk, ModelDescription, RaggedBatch
from specdec.engine.transformers_model import TransformersModel
from tests.support.engine_models import ARCHITECTURES, SEVERAL_ARCHITECTURES, model_class

META = torch.device("meta")
BATCH = RaggedBatch(
    (
        Chunk([1], 0, [5] * 9, 3),
        Chunk([2], 30, [6], 1),
        Chunk([3], 7, [8, 9], 0),
        Chunk([4], 8, [7], 1),
    )
)
ALONE = RaggedBatch((Chunk([1], 9, [5, 7, 8], 3),))
COPIES = ("copy_", "_to_copy")


class OnePlace(TorchDispatchMode):
    """Fails on an operation, other than a copy, of tensors on two devices; single numbers may be on any device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0]
        tensors = [entry for entry in tree_leaves((args, kwargs)) if isinstance(entry, torch.Tensor) and entry.dim()]
        assert name in COPIES or len({tensor.device for tensor in tensors}) <= 1, f"{name} of tensors in two places"
        return function(*args, **(kwargs or {}))


@pytest.fixture
def without_numbers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces the decisions that read numbers: stand-ins fit, and nothing drifts."""
    monkeypatch.setattr(modules, "is_near", lambda ours, theirs: ours.shape == theirs.shape)
    monkeypatch.setattr(norms, "difference", lambda ours, theirs: 0 if ours.shape == theirs.shape else None)
    monkeypatch.setattr(rotary_attention, "_is_near", lambda ours, theirs, tolerance: ours.shape == theirs.shape)
    monkeypatch.setattr(backend_module, "measure_drift", lambda *arguments: 0.0)
    yield


def meta_model(architecture: str, dtype: torch.dtype, has_trees: bool = False) -> TransformersModel:
    kind = model_class(architecture)
    entries = ARCHITECTURES[architecture][1] | {"vocab_size": 300}
    with META:
        model = kind._from_config(kind.config_class(**entries), dtype=dtype, attn_implementation=attention.NAME)
    description = ModelDescription("", "", 288, 512, (), str(dtype), "meta", "")
    backend = DeviceBackend(META, dtype, 512, with_graphs=True, graph_sequences_max=1, has_trees=has_trees)
    return TransformersModel(model.eval().requires_grad_(False), description, backend)


@pytest.mark.usefixtures("without_numbers")
@pytest.mark.parametrize("architecture", SEVERAL_ARCHITECTURES)
def test_a_step_stays_on_its_device(architecture: str) -> None:
    """Claim: in every way of attending, of its own shape and replayed, a step of any architecture computes on its
    device alone, calls torch's own varlen_attn as documented, and returns float32 logits of the requested rows.
    Conclusive: a tensor made on the host, a wrong type or shape raises; the last lines show that the watch works.
    """
    model = meta_model(architecture, torch.bfloat16)
    backend = model.backend
    assert isinstance(backend, DeviceBackend)
    ways: tuple[AttentionBackend, ...] = (DENSE, *candidates(256))
    for way in ways:
        model.allocate(8, 256)
        backend.way = way
        backend._shapes = backend._shapes_for(512)
        for shape in backend._shapes:
            backend._fixed.reserve(shape)
        for batch, count in ((BATCH, 5), (ALONE, 3)):
            with OnePlace():
                output = model.forward(batch)
            assert output.logits.shape == (count, 288)
            assert output.logits.dtype == torch.float32 and output.logits.device == META
        assert backend.graph_count > 0
    draft = meta_model(architecture, torch.bfloat16, has_trees=True)
    draft.allocate(8, 256)
    for each in (model, draft):
        with OnePlace():
            tree = Chunk([1, 4], 4, [5, 6], 2, [[300], [300, 9]])
            output = each.forward(RaggedBatch((tree, Chunk([2], 30, [6], 1))))
        assert output.logits.shape == (3, 288) and output.logits.device == META
    assert model.product_bytes > 0 and model.cache_bytes_per_position > 0
    with OnePlace(), pytest.raises(AssertionError, match="two places"):
        torch.empty(3, 2, device=META).index_select(0, torch.tensor([1]))
