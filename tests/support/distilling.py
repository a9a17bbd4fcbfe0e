"""Runs `specdec distill` as a person does, on a few short texts; and texts that are a rule, to learn within seconds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from specdec.cli.main import main
from specdec.distill.texts import LabelledTexts

PROMPTS = "def total\nreturn sum\nfor value in\nif value is not\n"
CYCLE = 12  # tokens of the texts below: token t is followed by t + 5, modulo this
TEXT_LENGTH = 20


def cyclic_texts(count: int, first: int) -> LabelledTexts:
    """Texts whose every token follows from the one before, and labels that are nearly certain of it."""
    starts = torch.arange(first, first + count)[:, None]
    token_ids = (starts + 5 * torch.arange(TEXT_LENGTH)) % CYCLE  # [texts, length]
    following = ((token_ids + 5) % CYCLE).flatten()
    return LabelledTexts(
        token_ids.flatten().to(torch.int32),
        torch.stack([following, (following + 1) % CYCLE], 1).to(torch.int32),
        torch.tensor([0.98, 0.01]).log().to(torch.float16).expand(count * TEXT_LENGTH, 2).contiguous(),
        torch.full((count,), TEXT_LENGTH, dtype=torch.int32),
        torch.full((count,), 2, dtype=torch.int32),
        torch.full((count,), 3, dtype=torch.int32),
        torch.tensor([0.0, 0.7]).repeat(count)[:count],
    )


def distilled(
    monkeypatch: pytest.MonkeyPatch,
    target: Path,
    out: Path,
    *more: str,
    prompts: Path | None = None,
    tokens: int = 3000,
) -> int:
    """Returns the exit code; `prompts`: a file, of PROMPTS by default."""
    if prompts is None:
        prompts = out.parent / "prompts.txt"
        prompts.write_text(PROMPTS)
    told = f"--target {target} --out {out} --prompts {prompts} --text-count 8 --text-tokens 12 --tokens {tokens}"
    flags = f"{told} --evaluate-tokens {tokens // 3} --batch-tokens 256 --threads 1 --device cpu".split()
    monkeypatch.setattr(sys, "argv", ["specdec", "distill", *flags, *more])
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as ended:
        main()
    torch.set_num_threads(threads)
    return int(ended.value.code or 0)
