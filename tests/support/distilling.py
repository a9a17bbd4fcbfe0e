"""Runs `specdec distill` as a person does, on a few short texts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from specdec.cli.main import main

PROMPTS = "def total\nreturn sum\nfor value in\nif value is not\n"


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
