"""What a student starts from: the layers chosen by name, and the tokens its target uses most."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.distill.student import StudentShape, build_student, most_used
from specdec.distill.texts import LabelledTexts
from specdec.engine.loading.model_folder import open_model_folder
from tests.support.engine_models import make_tiny_model


@pytest.mark.parametrize(("name", "prefix"), [("gemma3", "model.layers"), ("gpt2", "transformer.h")])
@pytest.mark.parametrize(("given", "expected"), [((2, 0, 1), (2, 0, 1)), ((1,), (1,)), ((), (0, 2))])
def test_the_chosen_layers_are_copied_in_their_order(
    tmp_path: Path, name: str, prefix: str, given: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Claim: layer i of a student has the weights of the target's layer `target_layers[i]`; by default those of the
    first ones and the last. What is not a layer is the target's, and kinds of attention move with their layers.
    Conclusive: no two layers of the target are equal, so another order differs in every weight."""
    target = open_model_folder(str(make_tiny_model(tmp_path / "target", name)))
    reference = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)
    source = reference.state_dict()
    student = build_student(target, StudentShape(len(expected), target_layers=given), None, seed=0)
    own = student.state_dict()
    for index, layer in enumerate(expected):
        names = [key.removeprefix(f"{prefix}.{index}.") for key in own if key.startswith(f"{prefix}.{index}.")]
        assert len(names) > 5
        for key in names:
            weight = own[f"{prefix}.{index}.{key}"]
            assert torch.equal(weight, source[f"{prefix}.{layer}.{key}"]), (index, key)
            others = [source[f"{prefix}.{other}.{key}"] for other in range(3) if other != layer]
            assert not any(torch.equal(weight, other) for other in others), "layers must differ for this test"
    rest = [key for key in own if not key.startswith(f"{prefix}.")]
    assert rest and all(torch.equal(own[key], source[key]) for key in rest)
    assert not any(key.startswith(f"{prefix}.{len(expected)}.") for key in own)
    if name == "gemma3":
        kinds = reference.config.layer_types
        assert len(set(kinds)) == 2
        assert student.config.layer_types == [kinds[layer] for layer in expected]


def labels(rows: list[dict[int, float]], read: int) -> LabelledTexts:
    """One text of the token `read` with these probabilities at its positions, as many at each."""
    count = len(rows)
    return LabelledTexts(
        torch.full((count,), read, dtype=torch.int32),
        torch.tensor([list(row) for row in rows], dtype=torch.int32),
        torch.tensor([list(row.values()) for row in rows]).log().to(torch.float16),
        torch.tensor([count], dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32),
        torch.zeros(1),
    )


def test_the_tokens_with_most_probability_are_kept() -> None:
    """Claim: ids are ordered by the target's probability, summed over the positions, not by how often they are among
    the likeliest, nor by what the text has; `always` are among them; there are fewer where the texts show fewer, and
    they are ascending. By hand: 9 has 0.9, 4 has 0.3 + 0.3 + 0.2 = 0.8, 7 has 0.1 + 0.3 + 0.2 = 0.6, 2 has 0.4."""
    texts = labels([{9: 0.9, 7: 0.1}, {7: 0.3, 4: 0.3}, {4: 0.3, 7: 0.2}, {2: 0.4, 4: 0.2}], read=11)
    assert most_used(texts, 1).tolist() == [9]
    assert most_used(texts, 2).tolist() == [4, 9]
    assert most_used(texts, 3).tolist() == [4, 7, 9]
    assert most_used(texts, 99).tolist() == [2, 4, 7, 9], "the text's own token 11 is not one that the target uses"
    assert most_used(texts, 2, always=[0]).tolist() == [0, 9]
    assert most_used(texts, 2, always=[30]).tolist() == [9, 30], "an id beyond those of the texts"
