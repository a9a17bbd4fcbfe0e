"""The shipped encoder-decoder pair: its files are those of the manifests, and it restores Python."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from tokenizers import Tokenizer

from models.distill_encoder_decoder import load_model, written
from models.evaluate_encoder_decoder import PROMPTS_FILE
from models.formatting import TOKENS_MAX, flattened, pairs_of
from specdec.distill.training import padded
from specdec.folders import EMBEDDED_MODELS, FORMATTING_PAIR, local_folder

FOLDERS = tuple(map(local_folder, FORMATTING_PAIR))
BYTES_MAX = 10_000_000


def rows() -> list[dict[str, str]]:
    """The shipped prompts with their texts."""
    return [json.loads(line) for line in PROMPTS_FILE.read_text(encoding="utf-8").splitlines()]


def test_files_are_those_of_the_manifests_and_small() -> None:
    """Claim: each file has the digest of its folder's list and none is unlisted, both folders have at most 10 MB
    together, and one tokenizer; their names are those of shipped folders."""
    assert all(folder.parent == EMBEDDED_MODELS for folder in FOLDERS)
    for folder in FOLDERS:
        lines = (folder / "SHA256SUMS").read_text().splitlines()
        listed = {path: digest for digest, path in (line.split("  ") for line in lines)}
        assert set(listed) == {path.name for path in folder.iterdir()} - {"SHA256SUMS"}
        for path, digest in listed.items():
            assert hashlib.sha256((folder / path).read_bytes()).hexdigest() == digest, f"{path}: mend or list it"
    assert sum(file.stat().st_size for folder in FOLDERS for file in folder.iterdir()) <= BYTES_MAX
    assert len({(folder / "tokenizer.json").read_bytes() for folder in FOLDERS}) == 1


def test_prompts_are_distinct_and_short_enough() -> None:
    """Claim: 200 prompts, ids ascending, none twice; each is its text on one line, and both fit the models."""
    found = rows()
    assert [row["id"] for row in found] == list(range(200)) and len({row["prompt"] for row in found}) == 200
    words = Tokenizer.from_file(str(FOLDERS[0] / "tokenizer.json"))
    assert all(row["prompt"] == flattened(row["text"]) for row in found)
    assert max(len(words.encode(row[key]).ids) for row in found for key in ("prompt", "text")) <= TOKENS_MAX + 1


@pytest.mark.more
@torch.inference_mode()
def test_the_target_restores_texts_and_the_draft_foresees_them() -> None:
    """Claim: of 16 held-out prompts a third of the greedy texts of the target have the words of the prompt, and at most
    of their positions the draft's likeliest token is the target's.

    Conclusive: swapped or damaged weights copy nothing, and chance is one token in 4,096.
    """
    torch.set_num_threads(1)
    target, draft = map(load_model, FOLDERS)
    words = Tokenizer.from_file(str(FOLDERS[0] / "tokenizer.json"))
    chosen = rows()[:16]
    pairs = pairs_of(words, [row["text"] for row in chosen])
    inputs = pairs.inputs.split(pairs.input_lengths.tolist())
    texts = written(target, inputs, 0.0)
    restored = [flattened(words.decode(text.tolist())) == row["prompt"] for text, row in zip(texts, chosen)]
    (sources, is_source), (outputs, is_output) = padded(inputs), padded(texts)
    likeliest = [
        model(sources, attention_mask=is_source, decoder_input_ids=outputs, use_cache=False).logits.argmax(2)[is_output]
        for model in (target, draft)
    ]
    agreement = float((likeliest[0] == likeliest[1]).float().mean())
    assert sum(restored) > 4 and agreement > 0.8, (restored, agreement)
