"""`specdec distill --start`: a draft that learns on, and the drafts that cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specdec.distill.start import open_start
from specdec.distill.student import save_student
from specdec.engine.loading.folder_files import MANIFEST_FILE
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.engine.vocabulary_map import VOCABULARY_FILE
from specdec.errors import ConfigError, ModelRefused
from tests.support.distilling import distilled
from tests.support.engine_models import make_tiny_model

KNOWN = [*range(0, 288, 3)]  # tokens of a draft that lacks the others
FAR_BELOW = 1e-30  # a learning rate that changes no float32 weight


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "target", "llama")


def trimmed(folder: Path, seed: int = 3) -> Path:
    """A draft of another architecture with the tokens KNOWN, and one for all others."""
    make_tiny_model(folder, "gpt2", seed, vocab_size=len(KNOWN) + 1)
    (folder / VOCABULARY_FILE).write_text(json.dumps({"target_token_ids": KNOWN}))
    return folder


def contents_of(*folders: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for folder in folders for file in folder.iterdir()}


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_it_begins_as_the_draft(target: Path, tmp_path: Path, is_trimmed: bool) -> None:
    """Claim: the student has the draft's weights in float32, of another architecture than the target's too, and saved
    it is a draft with the same tokens."""
    start = trimmed(tmp_path / "start") if is_trimmed else make_tiny_model(tmp_path / "start", "gpt2", 3)
    folder = open_model_folder(str(target))
    opened = open_start(str(start), folder)
    student = opened.load()
    reference = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).state_dict()
    own = student.state_dict()
    assert own.keys() == reference.keys() and all(torch.equal(own[name], reference[name]) for name in own)
    assert not student.training and all(weight.requires_grad for weight in student.parameters())
    assert (None if opened.token_ids is None else opened.token_ids.tolist()) == (KNOWN if is_trimmed else None)
    save_student(student, folder, opened.token_ids, 0.5, tmp_path / "out", {})
    assert load_model(str(tmp_path / "out"), has_stable_rows=False).description.vocabulary_size == 288
    assert (tmp_path / "out" / VOCABULARY_FILE).is_file() == is_trimmed


def test_it_learns_on_and_keeps_its_tokens(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a draft with a part of the tokens learns, keeps these tokens, and its own folder is not changed; with a
    learning rate that changes nothing the result has the draft's weights, so training begins with them. Conclusive:
    the draft is random, so it agrees with the target by chance only."""
    start = trimmed(tmp_path / "start")
    before = {file.name: file.read_bytes() for file in start.iterdir()}
    texts = str(tmp_path / "texts")
    assert distilled(monkeypatch, target, tmp_path / "out", "--start", str(start), "--texts", texts) == 0
    history = json.loads((tmp_path / "out" / "training.json").read_text())["history"]
    first, last = history[0]["acceptance"], history[-1]["acceptance"]
    assert sum(last.values()) > sum(first.values()) + 0.1, (first, last)
    known = json.loads((tmp_path / "out" / VOCABULARY_FILE).read_text())["target_token_ids"]
    assert known == KNOWN and before == {file.name: file.read_bytes() for file in start.iterdir()}
    told = ("--start", str(start), "--texts", texts, "--learning-rate", str(FAR_BELOW))
    assert distilled(monkeypatch, target, tmp_path / "same", *told) == 0
    given, same = (load_file(folder / "model.safetensors") for folder in (start, tmp_path / "same"))
    assert all(torch.equal(weight, given[name].to(torch.bfloat16)) for name, weight in same.items())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--layers", "1"], "--layers is for new drafts: leave it out, --start {start} keeps its own"),
        (["--hidden-size", "32"], "--hidden-size is for new drafts: leave it out"),
        (["--target-layers", "1"], "--target-layers is for new drafts: leave it out"),
        (["--draft-vocabulary", "99"], "--draft-vocabulary is for new drafts: leave it out"),
        (["--heads", "2"], "--start is for drafts: leave it out with --heads"),
        (["--out", "{start}"], "--out {start} is --start too; give another folder"),
        (["--out", "{target}"], "--out {target} is --target too; give another folder"),
        (["--start", "{start}/none"], "{start}/none: no such folder"),
        (["--text-tokens", "600"], "--start {start} has 512 positions: give a smaller --text-tokens"),
    ],
)
def test_flags_that_contradict_it_are_refused(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    sentence: str,
) -> None:
    """Claim: each is refused in one line that names flag, value and remedy, before anything is written."""
    start = make_tiny_model(tmp_path / "start", "gpt2", 3)
    before = contents_of(start, target)
    given = [flag.format(start=start, target=target) for flag in flags]
    capsys.readouterr()
    assert distilled(monkeypatch, target, tmp_path / "out", "--start", str(start), *given) in (1, 2)
    said = capsys.readouterr().err
    assert sentence.format(start=start, target=target) in said and len(said.splitlines()) == 1, said
    assert not (tmp_path / "out").exists() and contents_of(start, target) == before


def test_other_drafts_are_refused(target: Path, tmp_path: Path) -> None:
    """Claim: another tokenizer, fewer tokens without their names, a wrong map and a weights file that was cut are
    refused, each with its reason."""
    folder = open_model_folder(str(target))
    other = make_tiny_model(tmp_path / "other", "llama", vocabulary_size=300)
    with pytest.raises(ConfigError, match=f"--start {other} has another tokenizer than the target"):
        open_start(str(other), folder)
    fewer = trimmed(tmp_path / "fewer")
    (fewer / VOCABULARY_FILE).unlink()
    with pytest.raises(ConfigError, match=f"--start {fewer} has 97 tokens; it must have the target's 288"):
        open_start(str(fewer), folder)
    (fewer / VOCABULARY_FILE).write_text(json.dumps({"target_token_ids": KNOWN[1:]}))
    with pytest.raises(ModelRefused, match="it must name 96 different ids"):
        open_start(str(fewer), folder)
    cut = trimmed(tmp_path / "cut")
    (cut / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelRefused, match=f"{cut}/model.safetensors .*header"):
        open_start(str(cut), folder).load()
    (cut / MANIFEST_FILE).write_text(f"{'0' * 64}  model.safetensors\n")
    with pytest.raises(ModelRefused, match=f"is not the file {MANIFEST_FILE} describes"):
        open_start(str(cut), folder).load()
