"""`specdec distill` with packed weights: of the target, and of the draft that learns on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdec.engine.loading.folder_files import GGUF_FILE
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from tests.support.compressed_folders import pack_folder
from tests.support.distilling import distilled
from tests.support.engine_models import make_tiny_model
from tests.support.gguf_models import make_tiny_gguf

UNCHANGED = ("--learning-rate", "1e-30")  # changes no weight


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["GGUF", "compressed"])
def test_a_draft_of_a_packed_target(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a draft begins as the layers of a packed target, unpacked, and is a dense folder that is served; texts are
    written by the target with its packed weights. Conclusive: with a learning rate that changes nothing the saved
    weights are the packed folder's own, unpacked by its reader; as packed ones they would have other shapes."""
    if kind == "GGUF":
        target = make_tiny_gguf(tmp_path, "llama", "Q8_0")
    else:
        target = tmp_path / "target"
        pack_folder(make_tiny_model(tmp_path / "source", "llama"), target, "int8-rows")
    assert distilled(monkeypatch, target, tmp_path / "out", "--layers", "1", *UNCHANGED) == 0
    packed = open_model_folder(str(target)).packed
    assert packed is not None
    last = max(name.split(".")[2] for name in packed.tensors if ".layers." in name)
    for name, weight in load_file(tmp_path / "out" / "model.safetensors").items():
        unpacked = packed.dense(name.replace(".layers.0.", f".layers.{last}."))
        assert torch.equal(weight, unpacked.to(torch.bfloat16)), name
    assert not (tmp_path / "out" / GGUF_FILE).exists()
    assert load_model(str(tmp_path / "out"), has_stable_rows=False).description.vocabulary_size == 288


def test_a_packed_draft_learns_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: the draft of --start may be a GGUF file and the target dense: it begins with the file's weights, unpacked.
    Conclusive: as above; a higher learning rate changes them and more draft tokens would pass."""
    target = make_tiny_model(tmp_path / "target", "llama")
    start = make_tiny_gguf(tmp_path, "qwen2", "Q4_0")
    told = ("--start", str(start), "--texts", str(tmp_path / "texts"))
    assert distilled(monkeypatch, target, tmp_path / "same", *told, *UNCHANGED) == 0
    packed = open_model_folder(str(start)).packed
    assert packed is not None
    for name, weight in load_file(tmp_path / "same" / "model.safetensors").items():
        assert torch.equal(weight, packed.dense(name).to(torch.bfloat16)), name
    assert distilled(monkeypatch, target, tmp_path / "out", *told) == 0
    history = json.loads((tmp_path / "out" / "training.json").read_text())["history"]
    assert sum(history[-1]["acceptance"].values()) > sum(history[0]["acceptance"].values())


def test_heads_of_a_packed_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: heads are learned on a packed target, unpacked, and are those of the target that is served packed.
    Conclusive: heads state the digest of their target, and that of the served one is computed by its own loading."""
    target = make_tiny_gguf(tmp_path, "llama", "Q8_0")
    assert distilled(monkeypatch, target, tmp_path / "heads", "--heads", "2") == 0
    stated = json.loads((tmp_path / "heads" / "heads.json").read_text())
    assert stated["target_digest"] == load_model(str(target)).description.model_digest
