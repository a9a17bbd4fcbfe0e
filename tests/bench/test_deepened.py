"""The deepened target: the same function at a larger cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from specdec.engine.loading.model_folder import open_model_folder
from tests.support.deepened import write_deepened, write_widened
from tests.support.engine_models import Driver
from tests.support.harness import TARGET_MODEL, heldout_prompts
from tests.support.threads import one_thread  # noqa: F401

EXTRA_LAYERS = 6


@pytest.fixture(scope="module")
def deepened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped target with a few layers more."""
    return write_deepened(tmp_path_factory.mktemp("deepened"), EXTRA_LAYERS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_is_the_same_function(deepened: Path, dtype: str) -> None:
    """Claim: logits of every position of a held-out prompt, and greedy text after it, are the shipped target's.

    Conclusive: bit for bit, at every position, in the engine the benchmark runs.
    """
    ids = Tokenizer.from_file(str(TARGET_MODEL / "tokenizer.json")).encode(heldout_prompts()[0]).ids[:48]
    shipped, deeper = Driver.load(TARGET_MODEL, dtype), Driver.load(deepened, dtype)
    assert torch.equal(deeper.feed(deeper.open(), ids), shipped.feed(shipped.open(), ids))
    assert deeper.greedy(ids, 8) == shipped.greedy(ids, 8)


def computed_layers(folder: Path) -> int:
    """Layers of which a step of a few rows writes keys and values."""
    driver = Driver.load(folder, "float32", block_size=16)
    driver.feed(driver.open(), [1, 2, 3])
    storage = driver.model.backend._storage
    return sum(bool(keys.any() and values.any()) for keys, values in zip(storage.keys, storage.values))


def test_it_costs_more(deepened: Path) -> None:
    """Claim: the extra layers are computed, not skipped.

    Conclusive: counted, not timed: a layer's keys and values are zero in the cache until its products were computed.
    """
    assert computed_layers(deepened) == computed_layers(TARGET_MODEL) + EXTRA_LAYERS > EXTRA_LAYERS


def test_its_folder_is_complete_and_its_own(deepened: Path) -> None:
    """Claim: it has more layers by its configuration, no manifest of other bytes, and another digest."""
    own, shipped = open_model_folder(str(deepened)), open_model_folder(str(TARGET_MODEL))
    assert own.config["num_hidden_layers"] == shipped.config["num_hidden_layers"] + EXTRA_LAYERS
    assert {key for key in own.config if own.config[key] != shipped.config[key]} == {"num_hidden_layers"}
    assert own.digest() != shipped.digest()
    assert json.loads((deepened / "tokenizer.json").read_bytes()) == json.loads(
        (TARGET_MODEL / "tokenizer.json").read_bytes()
    )


def test_the_widened_target_is_the_same_function_but_for_rounding(tmp_path: Path) -> None:
    """Claim: with MLPs four times as wide, logits differ by rounding only. Conclusive: in float32, at every position of
    a held-out prompt; the further hidden values are those of the others, so without the zeros the sums would be four
    times as large."""
    ids = Tokenizer.from_file(str(TARGET_MODEL / "tokenizer.json")).encode(heldout_prompts()[0]).ids[:48]
    shipped = Driver.load(TARGET_MODEL, "float32")
    wider = Driver.load(write_widened(tmp_path / "widened", 4), "float32")
    assert torch.allclose(wider.feed(wider.open(), ids), shipped.feed(shipped.open(), ids), rtol=1e-4, atol=1e-3)
