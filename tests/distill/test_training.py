"""The end of a training: patience, the weights that are kept, and a run that has ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.distill.texts import LabelledTexts
from specdec.distill.training import Batch, Data, Plan, Trainer

TEXT_LENGTH, TEXT_COUNT = 5, 4
BATCH_TOKENS = TEXT_LENGTH  # a text a step
EVALUATE_TOKENS = TEXT_LENGTH - 1  # learned of a text: an evaluation after each step
BUDGET_STEPS = 40


def test_hotter_texts_are_tested_at_1() -> None:
    """Claim: positions of a text above temperature 1, which live traffic has, count at 1, those of others at their own;
    the texts keep theirs. Conclusive: of labels of some tokens, the others in one, only temperatures up to 1 give a
    bound (`specdec.distill.losses.probabilities`)."""
    texts = replace(texts_of(3).texts, temperatures=torch.tensor([0.0, 0.7, 1.8]))
    batch = Data(texts, texts.learned_from, None).batch([0, 1, 2])
    found = batch.temperatures.view(3, TEXT_LENGTH - 1)
    assert torch.equal(found, torch.tensor([0.0, 0.7, 1.0])[:, None].expand_as(found))


class ScriptedLearner:
    """A stub: held-out acceptance is that of a list, its last value for good, and a step moves the one weight."""

    def __init__(self, script: list[float]) -> None:
        self.student = torch.nn.Linear(1, 1, bias=False)
        self.weights: list[float] = []  # at each evaluation
        self._script = script

    def backward(self, batch: Batch) -> float:
        loss = self.student.weight.sum()
        loss.backward()
        return loss.item()

    def acceptances(self, batch: Batch) -> dict[str, torch.Tensor]:
        self.weights.append(self.student.weight.item())
        return {"GREEDY 0": torch.tensor([self._script[min(len(self.weights), len(self._script)) - 1]])}


def texts_of(count: int) -> Data:
    """Texts of one token, learned from the second position on."""
    tokens = count * TEXT_LENGTH
    texts = LabelledTexts(
        torch.zeros(tokens, dtype=torch.int32),
        torch.zeros(tokens, 1, dtype=torch.int32),
        torch.zeros(tokens, 1, dtype=torch.float16),
        torch.full((count,), TEXT_LENGTH, dtype=torch.int32),
        torch.full((count,), 1, dtype=torch.int32),
        torch.full((count,), 1, dtype=torch.int32),
        torch.zeros(count),
    )
    return Data(texts, texts.learned_from, None)


def trainer_of(script: list[float], patience: int, checkpoint: Path) -> tuple[Trainer, ScriptedLearner]:
    budget = BUDGET_STEPS * EVALUATE_TOKENS
    plan = Plan(
        "kl", (1.0,), 0.1, BATCH_TOKENS, budget, 0.0, EVALUATE_TOKENS, patience, 0, "cpu", False, "settings", "texts"
    )
    learner = ScriptedLearner(script)
    return Trainer(learner, plan, texts_of(TEXT_COUNT), texts_of(1), checkpoint), learner


@pytest.mark.parametrize(
    ("script", "patience", "evaluations", "best"),
    [
        ([0.5, 0.4, 0.3], 3, 4, 0),  # it falls from the first step on
        ([0.2, 0.3, 0.6, 0.5, 0.5, 0.4], 2, 5, 2),
        ([0.2, 0.6, 0.5, 0.7, 0.6, 0.6], 2, 6, 3),  # a better one begins the count anew
        ([0.5, 0.5], 1, 2, 0),  # as good is not better
    ],
)
def test_patience_ends_a_run(tmp_path: Path, script: list[float], patience: int, evaluations: int, best: int) -> None:
    """Claim: training ends after `patience` evaluations in a row without a better held-out acceptance, long before its
    budget, with the weights of the best evaluation. Conclusive: a stub learner whose acceptance is given; without an
    end the run has 41 evaluations, and its one weight is another at each."""
    trainer, learner = trainer_of(script, patience, tmp_path / "checkpoint.safetensors")
    trainer.run()
    assert len(trainer.progress.history) == len(learner.weights) == evaluations
    assert trainer.progress.step == evaluations - 1
    assert len(set(learner.weights)) == evaluations
    assert learner.student.weight.item() == learner.weights[best]


def test_without_an_end_of_patience_the_budget_ends_it(tmp_path: Path) -> None:
    """Claim: a patience that is not used up leaves the end to the budget, and the run has an evaluation after its last
    step."""
    trainer, learner = trainer_of([0.5, 0.4], BUDGET_STEPS + 1, tmp_path / "checkpoint.safetensors")
    trainer.run()
    assert trainer.progress.step == BUDGET_STEPS == len(learner.weights) - 1


def test_a_run_that_patience_ended_has_ended(tmp_path: Path) -> None:
    """Claim: started again after such an end, a run makes no further step, and has the same best weights."""
    checkpoint = tmp_path / "checkpoint.safetensors"
    trainer, learner = trainer_of([0.5, 0.6, 0.4], 2, checkpoint)
    trainer.run()
    again, other = trainer_of([0.9], 2, checkpoint)
    assert again.resume()
    again.run()
    assert again.progress.step == trainer.progress.step == 3 and not other.weights
    assert other.student.weight.item() == learner.weights[1]
