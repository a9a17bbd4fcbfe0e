"""The choice, when a model is loaded, of the modules to replace and the models to refuse.

The choice never depends on a class's name: a module is tried; these tests try modules that must not be replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.pytorch_utils import Conv1D

from specdec.engine.attention import NAME, CallRecorder, ScoreRule, measure_shape, paged_attention
from specdec.engine.cpu.kernels import kernels
from specdec.engine.cpu.products import Activation, Normalized, OutputLayer, replace_modules
from specdec.engine.loading.architectures import SUPPORTED_ACTIVATIONS
from specdec.engine.norms import is_near
from specdec.engine.rotary_attention import fits, has_projections, rotary_size
from specdec.errors import ModelRefused
from tests.support.engine_models import WINDOW, model_class

NATIVE = kernels()
needs_kernels = pytest.mark.skipif(NATIVE is None, reason="there are no native kernels here")


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


@needs_kernels
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
    replace_modules(NATIVE, base, torch.float32, 512)
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

    eps = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.norm() * self.weight


@needs_kernels
@pytest.mark.parametrize("kind", [WholeNorm, lambda: nn.BatchNorm1d(16, eps=1e-6).eval(), nn.Tanh])
def test_a_module_that_may_mix_rows_is_refused(kind: Callable[[], nn.Module], folder_of: Callable[[str], Path]) -> None:
    """Claim: a module that is neither known nor computed alike by a kernel is refused, with its name.

    Source: `products.replace_modules`. Conclusive: a norm over all rows, named like one over each; one that takes its
    mean and variance from elsewhere; an activation without a kernel. All in the place of a module that passes.
    """
    base = load_plain(folder_of("llama"), "llama")
    base.layers[1].mlp.act_fn = kind()
    with pytest.raises(ModelRefused, match=r"layers\.1\.mlp\.act_fn of type (WholeNorm|BatchNorm1d|Tanh)"):
        replace_modules(NATIVE, base, torch.float32, 512)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kind, rounds_first, is_centered",
    [
        (LlamaRMSNorm, True, False),
        (Gemma2RMSNorm, False, False),
        (Olmo2RMSNorm, False, False),
        (CohereLayerNorm, False, True),
        (nn.LayerNorm, False, True),
    ],
)
def test_a_norm_has_the_gain_and_the_roundings_of_the_one_it_replaces(
    kind: type[nn.Module], rounds_first: bool, is_centered: bool, dtype: torch.dtype
) -> None:
    """Claim: root-mean-square norms, layer norms, gains stored as they are and less one, and the place of the rounding,
    are found from a module's results.

    Source: `norm_like`. Conclusive: random gains and biases, on other rows than it tried, compared by the size of a
    rounding; the readings of the gain differ by a whole, and the place of the rounding is that in the class's source.
    """
    generator = torch.Generator().manual_seed(0)
    norm = kind(64, eps=1e-5).requires_grad_(False)
    for parameter in norm.parameters():
        parameter.copy_(torch.randn(64, generator=generator))
    holder = nn.Sequential(norm.to(dtype))
    rows = torch.randn(50, 64, generator=generator).to(dtype)
    expected = holder(rows)
    replace_modules(NATIVE, holder, dtype, 8)
    assert isinstance(holder[0], Normalized) and holder[0].norm.is_centered == is_centered
    found = holder(rows)
    assert is_near(found, expected)
    if dtype != torch.float32:
        assert holder[0].norm.rounds_first == rounds_first and (found != expected).float().mean() < 0.02


@needs_kernels
@pytest.mark.parametrize("name", SUPPORTED_ACTIVATIONS)
def test_an_activation_is_the_one_it_replaces(name: str) -> None:
    """Claim: each supported activation is replaced by its kernel. Conclusive: compared with the module itself, over
    its whole range, in float32."""
    holder = nn.Sequential(ACT2FN[name])
    rows = torch.linspace(-12, 12, 4001)
    expected = holder(rows)
    replace_modules(NATIVE, holder, torch.float32, 8)
    assert isinstance(holder[0], Activation) and torch.allclose(holder(rows), expected, 1e-5, 1e-6)


@needs_kernels
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_have_their_bias_and_give_it_up(has_bias: bool) -> None:
    """Claim: linear modules of both layouts become products with their bias, which a rank takes from them, and an
    output layer scales and caps its logits. Conclusive: against float64, with a bias larger than the products."""
    generator = torch.Generator().manual_seed(0)
    linear, turned = nn.Linear(48, 33, bias=has_bias), Conv1D(33, 48)
    turned.weight = nn.Parameter(linear.weight.t().contiguous())
    bias = 100 * torch.randn(33, generator=generator) if has_bias else torch.zeros(33)
    turned.bias = nn.Parameter(bias)
    if has_bias:
        linear.bias = nn.Parameter(bias)
    rows, weight = torch.randn(2, 3, 48, generator=generator), linear.weight.detach().double()
    holder = nn.Sequential(linear, turned).requires_grad_(False)
    plain = rows.double() @ weight.t()
    replace_modules(NATIVE, holder, torch.float32, 8)
    for product in holder:
        assert (product(rows) - (plain + bias)).abs().max() < 1e-4
        taken = product.take_bias()
        assert (taken is None and not has_bias) or torch.equal(taken, bias)
        assert (product(rows) - plain).abs().max() < 1e-5
    output = OutputLayer(NATIVE, weight.float(), None, 0.5, 2.0)
    expected = 2 * torch.tanh(plain[0] * 0.5 / 2)
    assert (output(rows[0].bfloat16().float()) - expected).abs().max() < 0.05
    assert (output(rows[0]) - expected).abs().max() < 1e-5
