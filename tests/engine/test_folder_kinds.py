"""Folders as people have them: each kind loads to the logits that `transformers` has of the same folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from specdec.engine.loading.folder_files import GENERATION_FILE, INDEX_FILE, WEIGHTS_FILE
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from tests.support.engine_models import Driver, make_tiny_model, random_tokens

WIDTH = 301  # of the output layer of a tiny model


def edit_json(file: Path, **entries: object) -> None:
    """Sets entries, and takes those away that are None."""
    value = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    kept = {name: entry for name, entry in (value | entries).items() if entry is not None}
    file.write_text(json.dumps(kept), encoding="utf-8")


def check_logits(folder: Path, string_count: int = 288) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    driver, tokens = Driver.load(folder, "float32"), random_tokens(50, 1)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0, :, :string_count]
    found = driver.feed(driver.open(50), tokens)
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_sharded_folder_is_the_model_of_one_file(is_tied: bool, tmp_path: Path) -> None:
    """Claim: weights in several files with an index give the logits of the same weights in one.

    Source: the hub's larger models. Conclusive: a layer's weights lie in several files, each of which is needed.
    """
    folder = make_tiny_model(tmp_path / "model", "llama", tie_word_embeddings=is_tied)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / WEIGHTS_FILE).unlink()
    model.save_pretrained(folder, max_shard_size="60KB")
    opened = open_model_folder(str(folder))
    assert (folder / INDEX_FILE).is_file() and len(opened.weight_files) > 3
    layer = {tensor.file for name, tensor in opened.tensors.items() if ".layers.1." in name}
    assert len(layer) > 1
    check_logits(folder)


@pytest.mark.parametrize("kind", ["tied", "tied with a stored head", "untied"])
def test_tied_and_untied_heads(kind: str, tmp_path: Path) -> None:
    """Claim: a tied head is the embedding, stored or not; an untied one is its own.

    Source: `transformers` writes no tied head, other tools do. Conclusive: logits are those of `transformers`; an
    untied head has other weights than the embedding.
    """
    folder = make_tiny_model(tmp_path / "model", "llama", tie_word_embeddings=kind != "untied")
    weights = load_file(folder / WEIGHTS_FILE)
    assert ("lm_head.weight" in weights) == (kind == "untied")
    if kind == "tied with a stored head":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    if kind == "untied":
        assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    check_logits(folder)


@pytest.mark.parametrize(("entry", "other"), [("dtype", "torch_dtype"), ("torch_dtype", "dtype")])
def test_the_type_of_weights_by_either_name(entry: str, other: str, tmp_path: Path) -> None:
    """Claim: a folder of `transformers` 4 (torch_dtype) and of 5 (dtype) has the type that it names.

    Source: both versions' config.json. Conclusive: float16, which is no default, by one name alone.
    """
    folder = make_tiny_model(tmp_path / "model", "llama")
    edit_json(folder / "config.json", **{entry: "float16", other: None})
    assert load_model(str(folder)).description.dtype == "float16"


def test_a_chat_models_end_tokens_and_added_tokens(tmp_path: Path) -> None:
    """Claim: ids of a list in generation_config end a text, in its order; added tokens count as tokens, those beyond
    the tokenizer's own vocabulary too, and the padding of the output layer does not.

    Source: chat models, whose turn's end is an added token. Conclusive: the added tokens are the last ids, so one of
    them missing would make the model narrower; the layer has 301 columns.
    """
    folder = make_tiny_model(tmp_path / "model", "qwen2")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    base = tokenizer.get_vocab_size(with_added_tokens=False)
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    turn = tokenizer.token_to_id("<|im_end|>")
    edit_json(folder / GENERATION_FILE, eos_token_id=[turn, 0])
    description = load_model(str(folder)).description
    assert description.end_token_ids == (turn, 0) and turn >= base
    assert description.vocabulary_size == 291 < WIDTH
    check_logits(folder, 291)
