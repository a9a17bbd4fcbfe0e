"""Stage `sameness`: `python -m tests.sameness`, texts with speculation and without through the three services on the
device: tokens, text and the bits of log-probabilities."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re

from bench.gpu_session.worker import Session
from bench.runner import ROOT

COLUMNS = ("prompts", "tokens", "draft_tokens", "accepted", "differing_prompts", "differing_tokens")
SUMS = re.compile(r"^\W*all\W+" + r"\W+".join([r"(\d+)"] * len(COLUMNS)) + r"\W*$", re.M)


def run(session: Session) -> None:
    """Reports the sums of its table. Raises RuntimeError with its last line if it does not come to its end."""
    os.chdir(ROOT)
    prompts, tokens = (6, 12) if session.is_small else (40, 64)
    asked = f"--prompts {prompts} --tokens {tokens} --streams 8 --dtypes bfloat16"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = importlib.import_module("tests.sameness.__main__").main(asked.split())
    lines = [line.strip() for line in said.getvalue().splitlines() if line.strip()]
    sums = SUMS.search(said.getvalue())
    if sums is None:
        raise RuntimeError(f"it ended with {code}: {lines[-1]}")
    numerics = next((line for line in lines if line.startswith("bfloat16: ")), "")
    differing = [line for line in lines if " differs " in line]
    counts = dict(zip(COLUMNS, map(int, sums.groups())))
    session.add(
        command=f"python -m tests.sameness {asked}", exit_code=code, numerics=numerics, **counts, said=differing
    )
