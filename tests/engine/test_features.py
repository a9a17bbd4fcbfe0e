"""Features of rows are the residuals that `transformers` has between its layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec.engine.cpu.kernels import kernels
from specdec.engine.interface import Chunk, Features, RaggedBatch, tree_paths
from specdec.engine.loading.model import load_model
from specdec.engine.transformers_model import TransformersModel
from specdec.errors import ModelRefused
from tests.support.device_models import load_on_device
from tests.support.encoder_decoder_models import KINDS
from tests.support.engine_models import (
    DIFFERENT,
    SEVERAL_ARCHITECTURES,
    Driver,
    model_class,
    random_tokens,
    without_kernels,
)

LAYERS = (0, 1, 2, 3)  # entering each of three layers, and after the last
TOLERANCE = 2e-4  # as in test_transformers_equality, relative to the largest value
TEXT, OTHER = random_tokens(61, 1), random_tokens(9, 2)


@torch.inference_mode()
def reference(folder: Path, architecture: str, token_ids: list[int]) -> torch.Tensor:
    """The residuals of `transformers` in float32: its hidden states, and before the last norm its input."""
    model = model_class(architecture).from_pretrained(folder, dtype=torch.float32).eval()
    norm = next(
        child
        for name, child in model.base_model.named_children()
        if name in ("norm", "ln_f", "final_layernorm", "final_layer_norm")
    )
    last: list[torch.Tensor] = []
    norm.register_forward_pre_hook(lambda module, arguments: last.append(arguments[0][0]))
    states = model.base_model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return torch.cat([*(state[0] for state in states[:3]), last[0]], -1)


def is_near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return ours.shape == theirs.shape and bool((ours.float() - theirs).abs().max() < tolerance * theirs.abs().max())


def features_by_steps(model: TransformersModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of TEXT, read in chunks beside another sequence, its last tokens a tree, and of that sequence."""
    model.return_features(LAYERS)
    driver = Driver(model)
    table, other = driver.open(128), driver.open(32)
    parts, others = [], []
    for start, end in ((0, 23), (23, 24), (24, 58)):
        step = driver.step([(other, OTHER[start // 12 : start // 12 + 3], 1), (table, TEXT[start:end], end % 2)])
        assert step.features is not None
        others.append(step.features[:3])
        parts.append(step.features[3:])
    nodes = [7, TEXT[58], 9, TEXT[59], TEXT[60]]
    driver.cache.prepare_write(table, 63)
    chunk = Chunk(table.block_ids, 57, [TEXT[57], *nodes], 6, tree_paths([0, 0, 1, 2, 4], 58))
    step = model.forward(RaggedBatch((chunk,)))
    assert step.features is not None and torch.equal(step.features[0], parts[-1][-1])
    return torch.cat([*parts, step.features[[2, 4, 5]]]), torch.cat(others)


@pytest.mark.parametrize("architecture", SEVERAL_ARCHITECTURES)
@pytest.mark.parametrize("way", ["kernels", "plain"])
def test_features_are_the_residuals_of_transformers(
    architecture: str, way: str, folder_of: Callable[[str], Path]
) -> None:
    """Claim: of every family the features of all rows, in chunked prompts, beside others and on paths of trees, are the
    residuals of `transformers` as they enter each layer and before the last norm; with native kernels, in one call
    where the family allows, and row by row without them.

    Source: Li et al. 2025, section 3: features are hidden states of the target's layers. Conclusive: each layer's is
    compared for every row with that of one pass of `transformers`; the layers differ by more than the tolerance, and so
    do rows, which is asserted.
    """
    folder = folder_of(architecture)
    if way == "plain":
        with without_kernels():
            model = load_model(str(folder), "float32")
    else:
        model = load_model(str(folder), "float32")
    assert isinstance(model, TransformersModel) and isinstance(model, Features)
    found, others = features_by_steps(model)
    expected = reference(folder, architecture, TEXT)
    assert is_near(found, expected)
    assert is_near(torch.cat([others[:3], others[3:6]]), reference(folder, architecture, [*OTHER[:3], *OTHER[1:4]]))
    assert not is_near(found.roll(1, 0), expected) and not is_near(found.roll(64, 1), expected)


@pytest.mark.skipif(kernels() is None, reason="native kernels are off")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "olmo2"])
def test_the_call_has_the_bits_of_the_modules(architecture: str, dtype: str, folder_of: Callable[[str], Path]) -> None:
    """Claim: features of the native call have the bits of those of the modules that each call one kernel; and features
    leave all logits as they are.

    Conclusive: a batch that may be abandoned by any function runs module by module; a copy before the layer's sum, or
    of a rounded norm, has other bits.
    """
    found = []
    for by_modules in (False, True):
        model = load_model(str(folder_of(architecture)), dtype)
        assert isinstance(model, TransformersModel)
        model.return_features(LAYERS)
        driver = Driver(model)
        chunk = Chunk(driver.open(64).block_ids, 0, TEXT[:40], 3)
        step = model.forward(RaggedBatch((chunk,), (lambda: False) if by_modules else None))
        assert step.features is not None
        found.append((step.features, step.logits))
    plain = Driver(load_model(str(folder_of(architecture)), dtype))
    step = plain.model.forward(RaggedBatch((Chunk(plain.open(64).block_ids, 0, TEXT[:40], 3),)))
    assert step.features is None
    assert torch.equal(found[0][0], found[1][0]) and all(torch.equal(logits, step.logits) for _, logits in found)


@pytest.mark.parametrize("architecture", DIFFERENT)
@pytest.mark.parametrize("with_graphs", [False, True])
def test_a_devices_code_has_the_same_features(
    architecture: str, with_graphs: bool, folder_of: Callable[[str], Path]
) -> None:
    """Claim: the code of a GPU returns the features of all rows, without captured steps and with them.

    Conclusive: as above; captured steps have more rows than were asked for, which must not be returned.
    """
    model = load_on_device(folder_of(architecture), with_graphs)
    model.return_features(LAYERS)
    driver = Driver(model)
    table = driver.open(64)
    steps = [driver.step([(table, TEXT[start:end], 1)]) for start, end in ((0, 30), (30, 31), (31, 35))]
    assert all(step.features is not None for step in steps)
    assert bool(model.backend.graph_count) == with_graphs
    found = torch.cat([step.features for step in steps])
    assert is_near(found.cpu(), reference(folder_of(architecture), architecture, TEXT[:35]))


def test_an_encoder_decoder_model_is_refused(folder_of: Callable[[str], Path]) -> None:
    """Claim: a model with an encoder, whose cells hold two kinds of positions, gives no features, and says so."""
    model = load_model(str(folder_of(next(iter(KINDS)))))
    assert isinstance(model, Features)
    with pytest.raises(ModelRefused, match="an encoder-decoder model gives no features"):
        model.return_features((1,))
