"""Tables of positions are as long as a service's texts may be, and have the bits of the model's whole tables there.

A model may state millions of positions that are never served: whole tables would take gigabytes, and longer to compute
than everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from specdec.engine.interface import CausalModel
from specdec.engine.loading.model import load_model
from specdec.engine.table_model import write_table_model
from specdec.errors import ConfigError
from tests.engine.test_model_folder import edit_json
from tests.support.engine_models import Driver, make_tiny_model, random_tokens, without_kernels

POSITIONS_MAX = 512  # of the tiny models
SHORTENED = {"factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
KINDS: dict[str, tuple[str, dict]] = {
    "default": ("llama", {}),
    "linear": ("llama", {"rope_parameters": SHORTENED | {"rope_type": "linear"}}),
    "llama3": (
        "llama",
        {"rope_parameters": SHORTENED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    ),
    "yarn": ("llama", {"rope_parameters": SHORTENED | {"rope_type": "yarn"}}),
    "two kinds of layers": ("gemma3", {}),
    "a part of the head": ("gpt_neox", {}),
    "pairs of neighbours": ("cohere", {}),
    "a window": ("mistral", {}),
    "learned": ("gpt2", {}),
}


def tables_of(model: CausalModel) -> list[torch.Tensor]:
    """The tables of a loaded model: angles, or the learned embedding of positions."""
    base = model._base
    if hasattr(base, "wpe"):
        return [base.wpe.weight]
    return [table for pair in base.rotary_emb.tables.values() for table in pair]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_kernels", [True, False], ids=["kernels", "no kernels"])
def test_tables_end_at_the_served_positions_and_have_the_same_bits(
    kind: str, with_kernels: bool, tmp_path: Path
) -> None:
    """Claim: of every kind, tables have as many rows as positions are served, each with the bits it has in the whole
    table, whose values follow from the configuration alone; with kernels and without.

    Source: `RotaryTable`; some kinds of angles depend on the model's positions. Conclusive: lengths on both sides of
    vector registers, compared bit by bit.
    """
    architecture, entries = KINDS[kind]
    folder = make_tiny_model(tmp_path, architecture, **entries)

    def load(positions_max: int | None) -> CausalModel:
        with nullcontext() if with_kernels else without_kernels():
            return load_model(str(folder), "bfloat16", positions_max=positions_max)

    whole = load(None)
    assert {len(table) for table in tables_of(whole)} == {POSITIONS_MAX} == {whole.description.positions_max}
    for length in (7, 257):
        model = load(length)
        assert model.description.positions_max == length
        for table, its in zip(tables_of(model), tables_of(whole), strict=True):
            assert table.shape == (length, *its.shape[1:]) and torch.equal(table, its[:length])
            assert table.untyped_storage().nbytes() < its.untyped_storage().nbytes()  # no view of the whole


@pytest.mark.parametrize("kind", ["yarn", "a window", "learned"])
def test_logits_do_not_depend_on_the_served_positions(kind: str, tmp_path: Path) -> None:
    """Claim: a text that fits has the same logits, bit by bit, up to the last served position.

    Conclusive: every position is compared, the last one too.
    """
    architecture, entries = KINDS[kind]
    folder = make_tiny_model(tmp_path, architecture, **entries)
    tokens = random_tokens(100, seed=2)
    every = []
    for positions_max in (None, len(tokens)):
        driver = Driver(load_model(str(folder), positions_max=positions_max))
        every.append(driver.feed(driver.open(len(tokens)), tokens))
    assert torch.equal(*every)


def test_a_model_of_millions_of_positions_is_loaded_for_those_served(tmp_path: Path) -> None:
    """Claim: 16,777,216 positions, the most there may be, cost nothing if few are served.

    Conclusive: whole tables would have two times 16,777,216 rows; these have 64.
    """
    folder = make_tiny_model(tmp_path, "llama", num_hidden_layers=1)
    edit_json(folder / "config.json", max_position_embeddings=1 << 24)
    assert {len(table) for table in tables_of(load_model(str(folder), positions_max=64))} == {64}


def test_more_positions_than_the_model_has_are_refused(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Claim: a --max-model-len above the model's positions is refused with both, by every kind of model.

    Conclusive: exactly the model's positions pass.
    """
    write_table_model(tmp_path, 5, positions_max=POSITIONS_MAX)
    for folder in (folder_of("llama"), folder_of("gpt2"), tmp_path):
        assert load_model(str(folder), positions_max=POSITIONS_MAX).description.positions_max == POSITIONS_MAX
        with pytest.raises(ConfigError, match=f"--max-model-len is {POSITIONS_MAX + 1}; .* has {POSITIONS_MAX}"):
            load_model(str(folder), positions_max=POSITIONS_MAX + 1)
