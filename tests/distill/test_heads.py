"""`specdec distill --heads`: the labels that heads learn from, their loss and acceptance, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specdec.distill.learners import HeadsLearner
from specdec.distill.losses import Labels, certain_acceptance
from specdec.distill.training import Data, Plan, Trainer
from specdec.engine.heads import load_heads
from specdec.engine.loading.model_folder import open_model_folder
from specdec.engine.transformers_model import read_weights
from tests.support.distilling import CYCLE, cyclic_texts, distilled
from tests.support.engine_models import make_tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama")


def plan_of(tokens: int) -> Plan:
    return Plan("kl", (1.0,), 1e-2, 256, tokens, 0.0, tokens // 4, 9, 0, "cpu", False, "settings", "texts")


@pytest.mark.more
def test_agreement_rises_within_seconds(target: Path, tmp_path: Path) -> None:
    """Claim: trained on texts in which every token decides the next ones, three heads on a frozen random target are
    right at nearly all held-out positions, each at its own distance; the target does not change.

    Conclusive: the text of the held-out positions is a rule that only the distance of the head satisfies: a head whose
    labels are one position off has agreement 0.
    """
    folder = open_model_folder(str(target))
    model = read_weights(str(target), folder, folder.digest, torch.float32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    plan = plan_of(60_000)
    learner = HeadsLearner(model, 3, folder.token_string_count, plan)
    texts, heldout = cyclic_texts(24, 0), cyclic_texts(CYCLE, 7)
    data, tested = Data(texts, texts.learned_from, None), Data(heldout, heldout.answered_from, None)
    trainer = Trainer(learner, plan, data, tested, tmp_path / "checkpoint.safetensors")
    trainer.run()
    first, last = trainer.progress.history[0]["acceptance"], trainer.progress.history[-1]["acceptance"]
    assert set(last) == {f"head {head} at {temperature}" for head in (1, 2, 3) for temperature in ("0", "0.7")}
    assert all(value < 0.5 for value in first.values()) and all(value > 0.9 for value in last.values()), (first, last)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_certain_token_is_accepted_with_its_probability() -> None:
    """Claim: a token that is proposed with certainty passes with the target's probability at the temperature, at 0 if
    it is the likeliest, 0 if it is none of the labels. Conclusive: against a softmax over the whole vocabulary."""
    logits = 2 * torch.randn(9, 6, generator=torch.Generator().manual_seed(3))
    values, ids = logits.topk(6)
    labels, token_ids = Labels(ids, values - logits.logsumexp(1, keepdim=True)), torch.arange(9) % 6
    expected = (logits / 0.7).softmax(1)[torch.arange(9), token_ids]
    assert torch.allclose(certain_acceptance(labels, token_ids, 0.7), expected, atol=1e-5)
    assert torch.equal(certain_acceptance(labels, token_ids, 0.0), (logits.argmax(1) == token_ids).float())
    few = Labels(ids[:, :2], labels.log_probs[:, :2])
    assert float(certain_acceptance(few, ids[:, 2], 0.7).max()) == 0


def test_the_command_makes_heads_of_its_target_and_continues(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claim: `specdec distill --heads 2` writes a set that loads for its target, with its settings and evaluations, and
    says how to serve it; run again it continues where it ended. With more texts, which a checkpoint is not of, it is
    refused before the target writes them."""
    out = tmp_path / "heads"
    assert distilled(monkeypatch, target, out, "--heads", "2", tokens=1500) == 0
    said = capsys.readouterr().err
    assert "specdec target --model" in said and f"--heads {out}" in said.replace("\n", "")
    heads = load_heads(out, open_model_folder(str(target)).digest(), 64)
    assert heads.head_count == 2 and bool(heads.weight.abs().sum())
    facts = json.loads((out / "training.json").read_text())
    assert facts["settings"]["heads"] == 2 and facts["parameters"] == 2 * (64 * 64 + 64)
    assert {name.partition(" at ")[0] for name in facts["history"][-1]["acceptance"]} == {"head 1", "head 2"}
    assert distilled(monkeypatch, target, out, "--heads", "2", tokens=1500) == 0
    assert "continuing after" in capsys.readouterr().err
    assert distilled(monkeypatch, target, out, "--heads", "2", "--text-count", "80", tokens=1500) != 0
    assert "is of other settings: remove it, or give another --out" in capsys.readouterr().err
    assert len(list((out / "texts").iterdir())) == 2, "the texts of the first run"


def test_flags_of_drafts_are_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claim: with --heads a flag that only a draft has is refused, not ignored, and nothing is written."""
    for flags, name in ((("--layers", "2"), "--layers"), (("--draft-vocabulary", "99"), "--draft-vocabulary")):
        assert distilled(monkeypatch, target, tmp_path / "heads", "--heads", "2", *flags) != 0
        assert f"{name} is for drafts: leave it out with --heads" in capsys.readouterr().err
    assert not (tmp_path / "heads").exists()
