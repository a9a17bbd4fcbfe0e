"""The choice, when a model is loaded, of the modules to replace and the models to refuse.

The choice never depends on a class's name: a module is tried; these tests try modules that must not be replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from specdec.engine.tiled_modules import FusedRMSNorm, replace_modules, treats_rows_alone
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec.engine.attention import NAME, CallRecorder, ScoreRule, measure_shape, paged_attention
from specdec.engine.rotary_attention import fits, has_projections, rotary_size
from specdec.errors import ModelRefused
from tests.support.engine_models import WINDOW, model_class


def load_plain(folder: Path, architecture: str) -> nn.Module:
    """A base model as `transformers` loads it, calling our attention function, with nothing replaced."""
    model = model_class(architecture).from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME)
    return model.eval().requires_grad_(False).base_model


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("llama", [True, True, True]),
        ("qwen3", [True, True, True]),
        ("gemma3", [True, True, True]),
        ("smollm3", [True, False, True]),  # the second layer does not rotate
        ("cohere", [False, False, False]),  # rotates pairs of neighbours, not of halves
        ("olmo2", [False, False, False]),  # its norms run over all heads together
    ],
)
def test_a_stand_in_is_used_only_where_it_computes_the_same(
    architecture: str, expected: list[bool], folder_of: Callable[[str], Path]
) -> None:
    """Claim: an attention module with the four projections is replaced only where the stand-in calls the same.

    Source: `rotary_attention.fits`. Conclusive: modules with the same children that rotate otherwise, or not, are
    distinguished layer by layer.
    """
    base = load_plain(folder_of(architecture), architecture)
    attentions = [module for module in base.modules() if has_projections(module)]
    assert [fits(module, rotary_size(base.rotary_emb)) for module in attentions] == expected
    assert not fits(attentions[0], 4)  # a table for a part of the head only


def test_the_rules_of_layers_are_those_the_modules_pass(folder_of: Callable[[str], Path]) -> None:
    """Claim: window, cap and scale of every layer are those the model's own modules pass, before and after replacement.

    Source: `measure_shape`, found by calling. Conclusive: Gemma-2's layers alternate, and its scale does not follow
    from its head size.
    """
    base = load_plain(folder_of("gemma2"), "gemma2")
    expected = (ScoreRule(24**-0.5, WINDOW, 5.0), ScoreRule(24**-0.5, None, 5.0))
    shape = measure_shape(base)
    assert shape.rules == expected and shape.windows == (WINDOW, None)
    assert (shape.layer_count, shape.head_count, shape.kv_head_count, shape.head_size) == (3, 4, 2, 16)
    replace_modules(base, torch.float32, torch.float32, 512)
    assert measure_shape(base) == shape


@pytest.mark.parametrize("argument", ["s_aux", "position_bias", "attention_mask", "something_new"])
def test_an_argument_that_is_not_honoured_is_refused(argument: str) -> None:
    """Claim: attention sinks, position biases, masks and all unknown arguments are refused by name, not dropped.

    Source: design section 5, a parameter that is not honoured is never ignored. Conclusive: the same call passes
    without the argument, and with it set to None.
    """
    module = nn.Module()
    module.layer_idx = 0
    rows = torch.randn(1, 2, 3, 4)
    arguments = {"attention_mask": None, "scaling": 0.5, "plan": CallRecorder(), "position_ids": torch.zeros(1, 3)}
    paged_attention(module, rows, rows, rows, **(arguments | {argument: None}))
    with pytest.raises(ModelRefused, match=argument):
        paged_attention(module, rows, rows, rows, **(arguments | {argument: torch.zeros(1)}))


class WholeNorm(nn.Module):
    """A norm in name only: a row's result depends on the rows beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.norm() * self.weight


def test_a_module_that_mixes_rows_is_refused(folder_of: Callable[[str], Path]) -> None:
    """Claim: a norm of an unknown kind passes only if its rows are the same bits at every width.

    Source: `treats_rows_alone`. Conclusive: a norm over all rows, named like one over each, is refused, with its
    module's name.
    """
    assert treats_rows_alone(LlamaRMSNorm(16)) and treats_rows_alone(Gemma2RMSNorm(16))
    assert not treats_rows_alone(WholeNorm()) and not treats_rows_alone(nn.BatchNorm1d(16))
    base = load_plain(folder_of("llama"), "llama")
    base.layers[1].mlp.act_fn = WholeNorm()
    with pytest.raises(ModelRefused, match=r"layers\.1\.mlp\.act_fn of type WholeNorm"):
        replace_modules(base, torch.float32, torch.float32, 512)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm])
def test_a_fused_norm_has_the_gain_of_the_one_it_replaces(kind: type[nn.Module]) -> None:
    """Claim: gains stored as they are and gains stored less one both give the module's own result in one stand-in.

    Source: `tiled_modules`. Conclusive: random gains, compared to float32 rounding; the two readings differ by a whole.
    """
    norm = kind(32, eps=1e-5).requires_grad_(False)
    norm.weight.copy_(torch.randn(32, generator=torch.Generator().manual_seed(0)))
    holder = nn.Sequential(norm)
    rows = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    expected = norm(rows)
    replace_modules(holder, torch.float32, torch.float32, 8)
    assert isinstance(holder[0], FusedRMSNorm)
    assert torch.allclose(holder(rows), expected, 1e-5, 1e-6)
