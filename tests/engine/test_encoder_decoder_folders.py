"""Folders and settings of an encoder-decoder model that cannot be served are refused by field, value and limit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.engine.loading.encoder_decoder import check_encoder_decoder, encoder_positions
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.engine.parallel.share import check_split
from specdec.errors import ConfigError, ModelRefused
from tests.engine.test_model_folder import edit_json
from tests.support.encoder_decoder_models import START, edit_tensors, make_encoder_decoder

CONFIG, GENERATION = "config.json", "generation_config.json"
CONFIG_FAULTS: list[tuple[str, Any]] = [
    ("d_model", 0),
    ("d_kv", "12"),
    ("d_ff", -1),
    ("num_heads", 1 << 23),
    ("num_layers", 0),
    ("num_decoder_layers", 10**9),
    ("relative_attention_num_buckets", 3),
    ("relative_attention_max_distance", 8),  # as many as have a bucket of their own
    ("relative_attention_max_distance", 0),
    ("n_positions", 1),
    ("decoder_start_token_id", -1),
    ("decoder_start_token_id", 288),  # an output column without a token
    ("decoder_start_token_id", "3"),
    ("layer_norm_epsilon", -1.0),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without a fault, and without generation_config.json."""
    folder = make_encoder_decoder(tmp_path_factory.mktemp("whole") / "model")
    (folder / GENERATION).unlink()
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to plant a fault in."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelRefused) as caught:
        open_model_folder(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("field", "value"), CONFIG_FAULTS, ids=lambda part: str(part)[:40])
def test_a_wrong_value_is_refused_by_file_field_and_value(field: str, value: Any, folder: Path) -> None:
    """Claim: each is refused as `config.json: FIELD is VALUE; it must be ...`. Conclusive: the folder opens without."""
    open_model_folder(str(folder))
    edit_json(folder / CONFIG, **{field: value})
    assert f"{folder / CONFIG}: {field} is {json.dumps(value)}; it must be " in refusal(folder)


@pytest.mark.parametrize("value", ["swish", "gated-swish", "gelu-gated", 3, None])
def test_an_unknown_feed_forward_layer_is_refused(value: object, folder: Path) -> None:
    """Claim: an activation that no test compares is refused by name, also where the derived entry alone has it.
    Conclusive: the supported ones of the suite's folders load."""
    edit_json(folder / CONFIG, feed_forward_proj=value)
    assert f"feed_forward_proj {value!r} is not supported" in refusal(folder)
    edit_json(folder / CONFIG, feed_forward_proj="relu", dense_act_fn="tanh")
    assert "dense_act_fn 'tanh' is not supported" in refusal(folder)


def test_a_folder_without_a_start_token_is_refused(folder: Path) -> None:
    """Claim: without a start token in either file the folder is refused, and so is one that no text can hold; that of
    generation_config.json comes first. Conclusive: with one it opens, with that beginning."""
    assert open_model_folder(str(folder)).beginning == (START,)
    edit_json(folder / CONFIG, decoder_start_token_id=None)
    place = f"{folder / CONFIG}: decoder_start_token_id is null; it must be a token id below 288"
    assert place in refusal(folder)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    del config["decoder_start_token_id"]
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    assert place in refusal(folder)
    (folder / GENERATION).write_text(json.dumps({"decoder_start_token_id": 5}), encoding="utf-8")
    assert open_model_folder(str(folder)).beginning == (5,)
    for name, wrong in (("decoder_start_token_id", [5, 6]), ("forced_bos_token_id", 300), ("forced_bos_token_id", "x")):
        edit_json(folder / GENERATION, **{"decoder_start_token_id": 5, name: wrong})
        assert f"{folder / GENERATION}: {name} is {json.dumps(wrong)}; it must be a token id below 288" in refusal(
            folder
        )
        edit_json(folder / GENERATION, **{name: None})


def test_weights_that_do_not_fit_are_refused(folder: Path) -> None:
    """Claim: a missing tensor and one of another shape are refused by name before weights are read; an output layer of
    its own is missed only where the folder says that it has one. Conclusive: the folder loads without the faults, also
    with embeddings of both stacks beside the shared one."""
    load_model(str(folder))
    shared = torch.zeros(301, 64)
    edit_tensors(folder, encoder__embed_tokens__weight=shared, decoder__embed_tokens__weight=shared.clone())
    load_model(str(folder))
    edit_json(folder / CONFIG, tie_word_embeddings=False)
    with pytest.raises(ModelRefused, match="the weights lack lm_head.weight"):
        load_model(str(folder))
    edit_json(folder / CONFIG, tie_word_embeddings=True)
    bias = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    edit_tensors(folder, **{bias.replace(".", "__"): torch.zeros(32, 4)})
    with pytest.raises(
        ModelRefused, match=r"relative_attention_bias.weight has shape \[32, 4\]; by config.json it must"
    ):
        load_model(str(folder))
    edit_tensors(folder, **{bias.replace(".", "__"): None})
    with pytest.raises(ModelRefused, match=f"the weights lack {bias}"):
        load_model(str(folder))


def test_types_devices_and_ranks_that_it_cannot_run_on_are_refused(folder: Path) -> None:
    """Claim: float16, a GPU and several ranks are refused by name, with the reason, ranks before a weight is read.
    Conclusive: float32 and bfloat16 load, one of them as the folder's own type; several ranks are the reason that is
    named where the weights have a fault too."""
    with pytest.raises(ConfigError, match="dtype is float16; for .* it must be float32 or bfloat16"):
        load_model(str(folder), "float16")
    with pytest.raises(ConfigError, match="device is cuda:1; encoder-decoder models such as T5 run on the CPU backend"):
        check_encoder_decoder("T5", torch.float32, torch.device("cuda:1"))
    for dtype in ("auto", "bfloat16"):
        load_model(str(folder), dtype)
    edit_tensors(folder, shared__weight=None)
    with pytest.raises(ModelRefused, match="runs in one process, so --tensor-parallel-size must be 1"):
        check_split(str(folder), open_model_folder(str(folder)), 2)
    with pytest.raises(ModelRefused, match="the weights lack shared.weight"):
        load_model(str(folder))


def test_positions_are_those_of_input_and_output(folder: Path) -> None:
    """Claim: by default a sequence has the configuration's positions twice, for input and output; those asked for may
    be fewer or more, since there is no table of them. Conclusive: the description's numbers, by hand."""
    for asked, expected in ((None, (512, 256)), (100, (100, 99)), (512, (512, 256)), (2000, (2000, 1744)), (2, (2, 1))):
        description = load_model(str(folder), positions_max=asked).description
        assert (description.positions_max, description.encoder_positions_max) == expected, asked
    with pytest.raises(ConfigError, match="--max-model-len is 1; an encoder-decoder model needs at least 2"):
        load_model(str(folder), positions_max=1)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config.pop("n_positions", None)
    assert encoder_positions(config, 1024) == 512
