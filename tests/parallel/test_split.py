"""Which part of which weight a rank holds, and what cannot be split: from shapes, before weights are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.engine.loading.fitting import empty_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.engine.parallel.rank import ModelSource, run_follower
from specdec.engine.parallel.rank_config import RankPlace
from specdec.engine.parallel.share import check_split
from specdec.engine.parallel.split import Cut, plan_split
from specdec.engine.table_model import write_table_model
from specdec.errors import ConfigError, ModelRefused
from tests.support.engine_models import ARCHITECTURES

MATRIX_SHARE_MAX = 0.02  # of a model's matrices: what every rank may hold whole, such as GPT-2's positions


def held(cut: Cut | None, size: int) -> list[int]:
    """Indices of a dimension of `size` that a cut holds."""
    return list(range(size)) if cut is None else [index for start, end in cut.ranges for index in range(start, end)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_ranks_together_hold_every_weight_once(architecture: str, tiny_folder: Callable[..., Path]) -> None:
    """Claim: of every matrix a rank holds a half, both halves make up the whole, and nothing is held twice.

    Conclusive: counted index by index; all matrices are cut, positions and norms aside, so a rank has 1/N of them.
    """
    folder = tiny_folder(architecture)
    model = empty_model(str(folder), open_model_folder(str(folder)), torch.float32)
    splits = [plan_split("model", model, rank, 2) for rank in range(2)]
    whole = total = 0
    for path, parameter in model.named_parameters():
        cuts = [split.cuts.get(path) for split in splits]
        dimension = cuts[0].dimension if cuts[0] else 0
        size = parameter.shape[dimension]
        indices = [held(cut, size) for cut in cuts]
        if cuts[0] is None:
            whole += parameter.numel() if parameter.dim() > 1 and "wpe" not in path else 0
        else:
            assert sorted(indices[0] + indices[1]) == list(range(size)), path
            assert cuts[0].size == cuts[1].size >= len(indices[1]), path
        total += parameter.numel()
    assert whole <= MATRIX_SHARE_MAX * total


def test_key_heads_go_where_their_queries_are(tiny_folder: Callable[..., Path]) -> None:
    """Claim: with 4 query heads, 2 key heads and 4 ranks, ranks 0 and 1 hold key head 0, ranks 2 and 3 key head 1."""
    folder = tiny_folder("llama")
    model = empty_model(str(folder), open_model_folder(str(folder)), torch.float32)
    cuts = [plan_split("model", model, rank, 4).cuts for rank in range(4)]
    name = "model.layers.0.self_attn.{}_proj.weight"
    assert [cut[name.format("q")].ranges for cut in cuts] == [((16 * rank, 16 * rank + 16),) for rank in range(4)]
    assert [cut[name.format("k")].ranges for cut in cuts] == [((0, 16),), ((0, 16),), ((16, 32),), ((16, 32),)]


@pytest.mark.parametrize(
    ("architecture", "overrides", "rank_count", "said"),
    [
        ("llama", {}, 3, ("num_attention_heads is 4", "--tensor-parallel-size 3")),
        (
            "llama",
            {"num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 3},
            2,
            ("num_key_value_heads is 3",),
        ),
        ("llama", {"intermediate_size": 111}, 2, ("intermediate_size is 111", "2 ranks")),
        ("phi3", {"intermediate_size": 110}, 4, ("intermediate_size is 110", "4 ranks")),
        ("gpt2", {}, 8, ("num_attention_heads is 4", "8 ranks")),
    ],
)
def test_what_cannot_be_split_is_refused_before_weights_are_read(
    architecture: str,
    overrides: dict[str, int],
    rank_count: int,
    said: tuple[str, ...],
    tiny_folder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Claim: a model whose plan cannot be split N ways is refused with name, field, value and N.

    Conclusive: the weights file is garbage, so reading it would raise another error.
    """
    made = open_model_folder(str(tiny_folder(architecture, **overrides)))
    garbage = tmp_path / "model.safetensors"
    garbage.write_bytes(b"no weights")
    folder = replace(made, weight_files=(garbage,))
    with pytest.raises(ModelRefused) as caught:
        check_split("the model", folder, rank_count)
    assert all(part in str(caught.value) for part in ("the model", *said))


def test_a_table_model_is_refused(tmp_path: Path) -> None:
    """Claim: the table model of the protocol tests is refused by its kind, before any rank is waited for."""
    write_table_model(tmp_path, 7)
    with pytest.raises(ModelRefused, match="table model"):
        run_follower(ModelSource(str(tmp_path)), RankPlace(1, 2, "127.0.0.1", 1))


def test_a_rank_is_one_of_its_count() -> None:
    """Claim: a rank outside its rank count is refused, with any launcher."""
    with pytest.raises(ConfigError, match="rank is 2"):
        RankPlace(2, 2, "127.0.0.1", 1)
