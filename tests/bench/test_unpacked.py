"""The dense copy of a packed model, beside which it is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdec.engine.loading.model_folder import open_model_folder
from tests.support.gguf_models import make_tiny_gguf
from tests.support.unpacked import write_unpacked


def test_the_copy_has_the_packed_models_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: the folder is opened as any other and has the same tokenizer, end tokens and weights, in bfloat16.
    Conclusive: each weight is compared with what the format's reader makes of the file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = make_tiny_gguf(tmp_path, "llama", "Q4_1")
    packed, dense = (open_model_folder(str(one)) for one in (file, write_unpacked(str(file), tmp_path / "dense")))
    assert packed.packed is not None and dense.packed is None
    assert dense.tokenizer == packed.tokenizer and dense.end_token_ids == packed.end_token_ids
    weights = load_file(dense.weight_files[0])
    assert weights.keys() == packed.packed.tensors.keys()
    assert all(torch.equal(own, packed.packed.dense(name).to(torch.bfloat16)) for name, own in weights.items())
