"""A draft of packed weights with a target of dense ones, and the other way round, through real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.compressed_folders import pack_folder
from tests.support.gguf_models import make_tiny_gguf
from tests.support.services import SHAPES, fixed, running

PROMPTS = ("def total(values):", "return sum if value", "for value in [1, 2, 345]:")
TOKENS = 40


def pair_of(kind: str, folder: Path) -> tuple[Path, Path]:
    """A target and a draft of the same tiny model: one packed, the other as it was."""
    file = make_tiny_gguf(folder, "llama", "Q4_1")
    dense = folder / "source"
    if kind == "compressed draft":
        pack_folder(dense, folder / "packed", "w8-groups")
        return dense, folder / "packed"
    if kind == "FP8 target":
        pack_folder(dense, folder / "packed", "fp8-blocks")
        return folder / "packed", dense
    return (file, dense) if kind == "GGUF target" else (dense, file)


@pytest.mark.parametrize(
    "kind",
    [
        *("GGUF target", "FP8 target"),
        *(pytest.param(f"{kind} draft", marks=pytest.mark.more) for kind in ("GGUF", "compressed")),
    ],
)
def test_one_of_a_pair_may_be_packed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a pair of which one model is packed is served, greedy and seeded texts are those without speculation, and
    a coordinator reads the tokenizer of a GGUF file. Source: the promise of any other pair. Conclusive: the models are
    the same but for the rounding of 4 or 8 bits, so most draft tokens pass; of other weights hardly one would."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    drafted = accepted = 0
    with running(*pair_of(kind, tmp_path), threads=1, dtype="float32") as services:
        for prompt in PROMPTS:
            for sampling in ({"temperature": 0}, {"temperature": 0.7, "seed": 5}):
                told = sampling | {"max_tokens": TOKENS, "ignore_eos": True}
                off = services.client.generate(prompt, **told, speculative=SHAPES["off"])
                for speculative in (fixed(3), SHAPES["tree"]):
                    on = services.client.generate(prompt, **told, speculative=speculative)
                    assert on.comparable == off.comparable and len(on.token_ids) == TOKENS
                    drafted += on.finished.statistics.num_draft_tokens
                    accepted += on.finished.statistics.num_accepted_draft_tokens
    assert 0 < drafted < 3 * accepted
