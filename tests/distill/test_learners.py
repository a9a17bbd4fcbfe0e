"""What a training step computes at once: the output layer and its loss in parts, and nothing else by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.distill import learners
from specdec.distill.learners import DraftLearner, HeadsLearner, losses_of
from specdec.distill.losses import Labels, greedy_acceptance, rejection_acceptance
from specdec.distill.texts import LabelledTexts
from specdec.distill.training import Batch, Data, Plan
from tests.support.engine_models import make_tiny_model

OWN_SIZE, TEXT_COUNT, TEXT_LENGTH, ROWS = 288, 4, 9, 5
PLAN = Plan("kl", (0.7, 1.0), 1e-3, 256, 1000, 0.0, 1000, 1, 0, "cpu", False, "settings", "texts")


def batch_of() -> Batch:
    """Texts of drawn tokens and labels, at two temperatures."""
    generator = torch.Generator().manual_seed(2)
    count = TEXT_COUNT * TEXT_LENGTH
    values, ids = torch.randn(count, OWN_SIZE, generator=generator).log_softmax(1).topk(8)
    texts = LabelledTexts(
        torch.randint(OWN_SIZE, (count,), generator=generator, dtype=torch.int32),
        ids.to(torch.int32),
        values.to(torch.float16),
        torch.full((TEXT_COUNT,), TEXT_LENGTH, dtype=torch.int32),
        torch.full((TEXT_COUNT,), 1, dtype=torch.int32),
        torch.full((TEXT_COUNT,), 1, dtype=torch.int32),
        torch.tensor([0.0, 0.7]).repeat(TEXT_COUNT // 2),
    )
    return Data(texts, texts.learned_from, None).batch(range(TEXT_COUNT))


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes parts of ROWS rows; returns the list of the rows of every call of an output layer from now on."""
    monkeypatch.setattr(learners, "LOGITS_ROWS_MAX", ROWS)
    counts: list[int] = []
    called = learners.OutputLayer.__call__

    def counted(self: learners.OutputLayer, rows: torch.Tensor) -> torch.Tensor:
        counts.append(len(rows))
        return called(self, rows)

    monkeypatch.setattr(learners.OutputLayer, "__call__", counted)
    return counts


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "granite"])
def test_parts_add_up_to_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Claim: loss, gradients and acceptance of a draft are, up to rounding, those of all its logits at once, and no
    more than LOGITS_ROWS_MAX rows of logits are made at a time, in the backward pass either. Conclusive: the whole is
    the model's own forward of `transformers`, with output layers that are scaled and capped among them."""
    folder = make_tiny_model(tmp_path / "draft", name)
    student, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    batch, counts = batch_of(), watched(monkeypatch)
    learner = DraftLearner(student, OWN_SIZE, PLAN)
    monkeypatch.setattr(type(student), "forward", None)  # whole logits are asked of the reference alone
    loss = learner.backward(batch)
    assert len(counts) == 2 * -(-batch.token_count // ROWS), "each part once more in the backward pass"
    with torch.no_grad():
        found = learner.acceptances(batch)
    monkeypatch.undo()
    logits = reference(input_ids=batch.inputs).logits[batch.learned][:, :OWN_SIZE]
    expected = losses_of(PLAN, batch.labels, logits).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for own, whole in zip(student.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(own.grad, whole.grad, rtol=1e-3, atol=1e-5)
    for rule, key, at in ((greedy_acceptance, "GREEDY 0", 0.0), (rejection_acceptance, "REJECTION 0.7", 0.7)):
        chosen = batch.temperatures == torch.tensor(at)
        labels = Labels(batch.labels.own_ids[chosen], batch.labels.log_probs[chosen])
        whole = rule(labels, logits[chosen].detach(), *[at] * (at > 0))
        assert torch.allclose(found[key], whole, atol=1e-4)
    assert set(found) == {"GREEDY 0", "REJECTION 0.7", "COUPLED 0.7"}
    assert max(counts) == ROWS


def test_heads_learn_in_parts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: loss and gradients of heads are, up to rounding, those without parts, and no more rows of logits are made
    at a time."""
    folder = make_tiny_model(tmp_path / "target", "llama")
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole = HeadsLearner(target, 2, OWN_SIZE, PLAN)
    expected, batch = whole.backward(batch_of()), batch_of()
    counts, learner = watched(monkeypatch), HeadsLearner(target, 2, OWN_SIZE, PLAN)
    assert learner.backward(batch) == pytest.approx(expected, rel=1e-5) and max(counts) == ROWS
    assert len(counts) % 2 == 0, "each part once more in the backward pass"
    for own, other in zip(learner.student.parameters(), whole.student.parameters(), strict=True):
        assert own.grad.abs().sum() > 0 and torch.allclose(own.grad, other.grad, rtol=1e-3, atol=1e-6)
