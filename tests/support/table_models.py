"""Models that compute nothing: what a token costs beside them is measured with these."""

from __future__ import annotations

from pathlib import Path

from specdec.engine.table_model import write_table_model


def table_models(folder: Path, vocabulary_size: int = 7, positions_max: int = 512) -> tuple[Path, Path]:
    """Writes target and draft of the protocol tests: table models with different distributions."""
    for seed, name in enumerate(("target", "draft")):
        write_table_model(folder / name, vocabulary_size, positions_max, seed)
    return folder / "target", folder / "draft"
