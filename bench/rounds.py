"""What rounds are measured with: sampling parameters by the name of their rule, and models that compute nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

RULES: dict[str, dict[str, Any]] = {
    "GREEDY, temperature 0": {"temperature": 0.0},
    "COUPLED, temperature 0.7": {"temperature": 0.7, "seed": 1},
    "REJECTION, temperature 0.7": {"temperature": 0.7},
    "COUPLED, temperature 1": {"temperature": 1.0, "seed": 1},
    "REJECTION, temperature 1": {"temperature": 1.0},
}


def named_rule(sampling: dict[str, Any]) -> str | None:
    """The rule that sampling parameters of RULES stand for, where it must be named: unseeded, the server would
    choose."""
    return "rejection" if sampling["temperature"] > 0 and "seed" not in sampling else None


def table_models(folder: Path, vocabulary_size: int = 7, positions_max: int = 512) -> tuple[Path, Path]:
    """Writes target and draft of the protocol tests: table models with different distributions."""
    from specdec.engine.table_model import write_table_model

    for seed, name in enumerate(("target", "draft")):
        write_table_model(folder / name, vocabulary_size, positions_max, seed)
    return folder / "target", folder / "draft"
