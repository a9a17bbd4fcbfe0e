"""The shipped models: the files are those of the manifests, and they fit together."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from models.data import PROMPTS_FILE, read_prompts
from specdec.cli.demo import CHAT_PROMPT_IDS
from specdec.engine.heads import load_heads
from specdec.engine.interface import Chunk, RaggedBatch
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import ModelRefused
from specdec.folders import EMBEDDED_MODELS

FOLDER = EMBEDDED_MODELS
MODELS = ("target", "draft")
CHAT_BYTES_MAX = 40 << 20
HEADS_BYTES_MAX = 3 << 20


@pytest.mark.parametrize("name", [*MODELS, "smollm2-draft", "smollm2-head"])
def test_every_shipped_file_has_the_digest_of_the_manifest(name: str) -> None:
    """Claim: no file of the pair changed or is missing from the list: measurements in the README are of these bytes."""
    lines = (FOLDER / name / "SHA256SUMS").read_text().splitlines()
    listed = {path: digest for digest, path in (line.split("  ") for line in lines)}
    assert set(listed) == {path.name for path in (FOLDER / name).iterdir()} - {"SHA256SUMS"}
    for path, digest in listed.items():
        assert hashlib.sha256((FOLDER / name / path).read_bytes()).hexdigest() == digest, f"{path}: mend or list it"


def test_both_models_have_one_tokenizer() -> None:
    """Claim: equal bytes, hence equal ids for every text."""
    assert len({(FOLDER / name / "tokenizer.json").read_bytes() for name in MODELS}) == 1


def test_the_chat_draft_is_small_and_only_a_draft() -> None:
    """Claim: the chat model's draft has at most 40 MB, and so has its head; the draft loads as one with the whole
    vocabulary of its tokenizer, of which it proposes its own tokens, the end token among them, and is refused as a
    target."""
    folder = FOLDER / "smollm2-draft"
    for own in ("smollm2-draft", "smollm2-head"):
        assert sum(file.stat().st_size for file in (FOLDER / own).iterdir()) <= CHAT_BYTES_MAX
    draft = load_model(str(folder), has_stable_rows=False)
    known = json.loads((folder / "draft_vocabulary.json").read_text())["target_token_ids"]
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert draft.description.vocabulary_size == words.get_vocab_size() > 2 * len(known)
    vocabulary = draft.description.vocabulary
    assert vocabulary is not None and vocabulary.own_size == len(known)
    assert set(draft.description.end_token_ids) <= set(known)
    draft.allocate(2, 64)
    ids = words.encode("The capital of France is").ids
    logits = draft.forward(RaggedBatch((Chunk([1], 0, ids, 1),))).logits[0]
    assert set((logits > -math.inf).nonzero().flatten().tolist()) == set(known)
    with pytest.raises(ModelRefused, match="it can only be a draft"):
        load_model(str(folder))


def test_chat_prompts_are_distinct_and_of_classes() -> None:
    """Claim: eight questions of each class, ids ascending, none twice; the demo's are among them."""
    rows = [json.loads(line) for line in (FOLDER / "chat_prompts.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(len(rows))) and len({row["prompt"] for row in rows}) == len(rows)
    assert set(Counter(row["class"] for row in rows).values()) == {8}
    assert set(CHAT_PROMPT_IDS) <= set(range(len(rows)))


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_bf16_safetensors_within_the_vocabulary(name: str) -> None:
    """Claim: every tensor is bf16, the output as wide as the vocabulary, and nothing but safetensors holds weights."""
    config = json.loads((FOLDER / name / "config.json").read_text())
    with safe_open(FOLDER / name / "model.safetensors", framework="pt") as tensors:
        assert {tensors.get_slice(key).get_dtype() for key in tensors.keys()} == {"BF16"}
        shape = tensors.get_slice("model.embed_tokens.weight").get_shape()
        assert shape == [config["vocab_size"], config["hidden_size"]]
    assert Tokenizer.from_file(str(FOLDER / name / "tokenizer.json")).get_vocab_size() == config["vocab_size"]


def test_prompts_are_distinct_and_of_one_form() -> None:
    """Claim: 200 prompts, ids ascending, none twice, each short enough to leave positions to generate."""
    rows = [json.loads(line) for line in (FOLDER / "heldout_prompts.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(200))
    assert len({row["prompt"] for row in rows}) == 200
    words = Tokenizer.from_file(str(FOLDER / "target" / "tokenizer.json"))
    assert max(len(words.encode(row["prompt"]).ids) for row in rows) < 512


@torch.no_grad()
def test_the_target_knows_more_than_the_draft_and_both_more_than_nothing() -> None:
    """Claim: on held-out prompts the target's loss is below the draft's, both far below a uniform guess.

    Conclusive: swapped or damaged weights would not order so; measured on these prompts 3.34 and 3.97, and a
    uniform guess is 8.32.
    """
    torch.set_num_threads(1)
    words = Tokenizer.from_file(str(FOLDER / "target" / "tokenizer.json"))
    rows = [torch.tensor([[0, *words.encode(prompt).ids]]) for prompt in read_prompts(PROMPTS_FILE)[:12]]
    losses = {}
    for name in MODELS:
        model = LlamaForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32)
        losses[name] = sum(model(input_ids=row, labels=row).loss.item() for row in rows) / len(rows)
    assert losses["target"] + 0.2 < losses["draft"] < math.log(4096) - 2


def test_the_heads_fit_the_target_and_continue_its_texts() -> None:
    """Claim: the shipped heads are small, load for the shipped target, and on its greedy texts after held-out prompts
    head 1 is right far more often than chance, and than the target's own next token would be at that place.

    Conclusive: texts and hidden states are those of `transformers`; a head read at another distance, or for other
    weights, falls to the level of the plain next token.
    """
    folder = FOLDER / "target-heads"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= HEADS_BYTES_MAX
    target = LlamaForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.float32).eval()
    heads = load_heads(folder, open_model_folder(str(FOLDER / "target")).digest(), target.config.hidden_size)
    words = Tokenizer.from_file(str(FOLDER / "target" / "tokenizer.json"))
    hits = own = count = 0
    with torch.inference_mode():
        for prompt in read_prompts(PROMPTS_FILE)[:4]:
            ids = torch.tensor([words.encode(prompt).ids])
            text = target.generate(ids, max_new_tokens=48, do_sample=False)[0]
            hidden = target.base_model(text[None]).last_hidden_state[0, ids.shape[1] - 1 : -2]
            wanted = text[ids.shape[1] + 1 :]  # of head 1: the token after each row's next one
            hits += int((target.lm_head(heads.of(0, hidden)).argmax(1) == wanted).sum())
            own += int((target.lm_head(hidden).argmax(1) == wanted).sum())
            count += len(wanted)
    assert hits > 0.25 * count and hits > 2 * own, (hits, own, count)
