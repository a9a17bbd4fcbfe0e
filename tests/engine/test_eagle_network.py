"""An EAGLE-3 head of the hub computes what its paper says (Li et al. 2025, section 3.1), in both layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.engine.eagle.config_check import TargetFacts
from specdec.engine.eagle.folder import load_eagle
from specdec.engine.eagle.network import EagleHead, default_layers, rotary_frequencies
from tests.support.eagle_folders import (
    DRAFT_IDS,
    HIDDEN,
    HUB_CONFIG,
    LAYERS,
    SPECULATORS_CONFIG,
    VOCABULARY,
    PlainHead,
    head_tensors,
    renamed,
    write_head,
)

TARGET = TargetFacts(HIDDEN, LAYERS, VOCABULARY, VOCABULARY)
LENGTH = 7


def rows(count: int, width: int, seed: int) -> torch.Tensor:
    return 2 * torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def of_both_layouts(folder: Path) -> list[tuple[EagleHead, PlainHead]]:
    """The same tensors in each layout, whose residuals differ by default."""
    tensors = head_tensors()
    hub = load_eagle(write_head(folder / "hub", HUB_CONFIG, tensors), TARGET)
    own = renamed(tensors, midlayer="layers.0")
    speculators = load_eagle(write_head(folder / "speculators", SPECULATORS_CONFIG, own), TARGET)
    assert (hub.config.aux_layer_ids, speculators.config.aux_layer_ids) == ((2, 4, 6), (1, 4, 9))
    return [(hub, PlainHead(tensors, False)), (speculators, PlainHead(tensors, True))]


def test_a_head_computes_what_its_description_says(tmp_path: Path) -> None:
    """Claim: x and logits of a text's pairs, then of two pairs whose feature is the head's own x, are those of a
    computation in numpy, pair after pair, in the layouts of the hub with their own defaults of the residual.

    Conclusive: float64 loops that share no code; weights at a scale at which norm, rotation, the order of embedding and
    feature, the residual and each past pair change logits by far more than the tolerance.
    """
    states, embeddings = rows(LENGTH, 3 * HIDDEN, 1), rows(LENGTH + 2, HIDDEN, 2)
    for head, plain in of_both_layouts(tmp_path):
        features = head.fc(states)[None]
        found = head(features, embeddings[None, :LENGTH], torch.arange(LENGTH))
        expected = [
            plain.pair(plain.feature(states[at].double().numpy()), embeddings[at].double().numpy(), at)
            for at in range(LENGTH)
        ]
        assert np.abs(found[0].double().numpy() - np.stack(expected)).max() < 1e-4
        logits = np.stack([plain.logits(x) for x in expected])
        assert np.abs(head.logits(found)[0].double().numpy() - logits).max() < 1e-4 < 1 < np.abs(logits).max()
        for at in range(LENGTH, LENGTH + 2):  # x is the next pair's feature
            features = torch.cat([features, found[:, -1:]], 1)
            found = head(features, embeddings[None, : at + 1], torch.arange(at + 1))
            expected.append(plain.pair(expected[-1], embeddings[at].double().numpy(), at))
            assert np.abs(found[0, -1].double().numpy() - expected[-1]).max() < 1e-3


def test_rows_see_what_their_mask_shows(tmp_path: Path) -> None:
    """Claim: with a mask, positions of each sequence of its own and a batch, a row is that of its past alone. Here two
    branches after a common beginning, as in a tree: each equals the chain that ends in it."""
    (head, _), _ = of_both_layouts(tmp_path)
    features, embeddings = head.fc(rows(5, 3 * HIDDEN, 3)), rows(5, HIDDEN, 4)
    positions = torch.tensor([4, 5, 6, 6, 7])  # row 3 is another child of row 1, row 4 its child
    sees = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]], dtype=torch.bool
    )
    found = head(features[None], embeddings[None], positions, sees)[0]
    for chain in ([0, 1, 2], [0, 1, 3, 4]):
        alone = head(features[None, chain], embeddings[None, chain], positions[chain])[0]
        assert torch.allclose(found[chain], alone, atol=1e-5)
    shifted = head(features[None, [0, 1, 3]], embeddings[None, [0, 1, 3]], torch.tensor([4, 5, 7]))[0]
    assert not torch.allclose(found[3], shifted[2], atol=1e-3), "a position counts"


def test_the_draft_vocabulary_is_the_targets_ids(tmp_path: Path) -> None:
    """Claim: d2t holds offsets, so token i is the target's i + d2t[i]; a token that the target has in its table and
    does not serve is no more proposed, and the others keep their rows; tokens in another order in the files are served
    ascending."""
    tensors = head_tensors()
    folder = write_head(tmp_path / "head", HUB_CONFIG, tensors)
    whole, fewer = load_eagle(folder, TARGET), load_eagle(folder, replace(TARGET, token_count=41))
    assert tuple(whole.target_ids.tolist()) == DRAFT_IDS and tuple(fewer.target_ids.tolist()) == DRAFT_IDS[:-2]
    x = rows(3, HIDDEN, 5)
    assert torch.equal(fewer.lm_head.weight, whole.lm_head.weight[:-2])
    assert torch.allclose(fewer.logits(x), whole.logits(x)[:, :-2], atol=1e-5)
    assert fewer.config.draft_vocabulary_size == len(DRAFT_IDS) - 2
    order = torch.arange(len(DRAFT_IDS)).flip(0)
    turned = tensors | {"lm_head.weight": tensors["lm_head.weight"][order]}
    turned["d2t"] = torch.tensor(DRAFT_IDS)[order] - torch.arange(len(DRAFT_IDS))
    again = load_eagle(write_head(tmp_path / "turned", HUB_CONFIG, turned), TARGET)
    assert tuple(again.target_ids.tolist()) == DRAFT_IDS and torch.equal(again.lm_head.weight, whole.lm_head.weight)


def test_rotary_scaling_is_that_of_the_configuration(tmp_path: Path) -> None:
    """Claim: the frequencies of "linear" are divided by its factor; of "llama3" short waves are as they were and long
    ones slower by the factor (Llama 3.1's description)."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    (plain, _), _ = of_both_layouts(tmp_path)
    usual, factor = rotary_frequencies(plain.config)
    slow, _ = rotary_frequencies(replace(plain.config, rope_scaling={"rope_type": "linear", "factor": 4.0}))
    assert factor == 1 and torch.allclose(usual, slow * 4)
    folder = write_head(tmp_path / "llama3", HUB_CONFIG | {"rope_scaling": scaling}, head_tensors())
    found, _ = rotary_frequencies(load_eagle(folder, TARGET).config)
    assert found[0] == usual[0] and found[-1] == pytest.approx(float(usual[-1]) / 8)


def test_default_layers_are_the_published_ones() -> None:
    """Claim: 2, n // 2 and n - 3 (vLLM, SGLang); of few layers the last inputs, ascending and within the target."""
    assert (default_layers(32), default_layers(30), default_layers(7)) == ((2, 16, 29), (2, 15, 27), (2, 3, 4))
    assert (default_layers(6), default_layers(2), default_layers(1)) == ((4, 5, 6), (0, 1, 2), (0, 1))
