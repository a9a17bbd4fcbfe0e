"""`--heads DIR` takes a folder of either kind of heads, and decides by what the folder holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.config import TargetSettings
from specdec.engine.eagle.folder import save_eagle
from specdec.engine.eagle.model import EagleTarget
from specdec.engine.heads import Heads, save_heads
from specdec.engine.loading.model import load_model
from specdec.engine.table_model import write_table_model
from specdec.errors import ConfigError, ModelRefused
from specdec.protocol.heads import HEAD_PASSES_MAX
from specdec.target_service.feature_head import FeatureHeadDrafter
from specdec.target_service.heads import HeadProposer, load_head_proposer
from tests.support.eagle_heads import random_head
from tests.support.encoder_decoder_models import KINDS, make_encoder_decoder
from tests.support.engine_models import make_tiny_model


def settings(model: Path, heads: Path | str) -> TargetSettings:
    return TargetSettings(model=str(model), heads=str(heads))


def test_a_folder_decides_the_kind_of_heads(tmp_path: Path) -> None:
    """Claim: heads.json gives Medusa heads and the model itself; config.json of EAGLE-3 gives a feature head, and a
    model whose cells are larger by what it keeps; no folder gives nothing. Conclusive: all three for one model."""
    folder, medusa, eagle = tmp_path / "model", tmp_path / "medusa", tmp_path / "eagle"
    make_tiny_model(folder, "llama")
    for own in (medusa, eagle):
        own.mkdir()
    model = load_model(str(folder))
    save_heads(Heads(2, 64), medusa, model.description.model_digest)
    save_eagle(random_head(), eagle)
    assert load_head_proposer(model, settings(folder, "none")).read is None
    of_medusa = load_head_proposer(model, settings(folder, medusa))
    assert isinstance(of_medusa.read, HeadProposer) and of_medusa.model is model
    assert (of_medusa.num_heads, of_medusa.head_passes_max) == (2, 0)
    of_eagle = load_head_proposer(load_model(str(folder)), settings(folder, eagle))
    assert isinstance(of_eagle.read, FeatureHeadDrafter) and isinstance(of_eagle.model, EagleTarget)
    assert (of_eagle.num_heads, of_eagle.head_passes_max) == (0, HEAD_PASSES_MAX)
    assert of_eagle.model.cache_bytes_per_position == model.cache_bytes_per_position + 4 * (64 + 2 * 2 * 16)
    assert torch.equal(of_eagle.model.target_ids, random_head().target_ids)


def test_heads_of_models_that_have_no_features_are_refused(tmp_path: Path) -> None:
    """Claim: a table model and an encoder-decoder model are refused with what they lack."""
    eagle = tmp_path / "eagle"
    eagle.mkdir()
    save_eagle(random_head(), eagle)
    write_table_model(tmp_path / "table", 6)
    with pytest.raises(ConfigError, match="has no hidden states"):
        load_head_proposer(load_model(str(tmp_path / "table")), settings(tmp_path / "table", eagle))
    pair = make_encoder_decoder(tmp_path / "pair", next(iter(KINDS)))
    with pytest.raises(ModelRefused, match="encoder-decoder"):
        load_head_proposer(load_model(str(pair)), settings(pair, eagle))
