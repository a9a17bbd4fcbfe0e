"""A target on a table model that ends as by the system's memory killer when a step has the token POISON.

Run as `python -m tests.support.poisoned_target FLAGS`, those of `specdec target`.
"""

from __future__ import annotations

import os
import signal

from specdec.cli.main import main
from specdec.engine.interface import RaggedBatch, StepOutput
from specdec.engine.table_model import TableModel

POISON = 6  # token id

forward = TableModel.forward


def poisoned(model: TableModel, batch: RaggedBatch) -> StepOutput:
    """`TableModel.forward`, unless a chunk has the token."""
    if any(POISON in chunk.token_ids for chunk in batch.chunks):
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(model, batch)


if __name__ == "__main__":
    TableModel.forward = poisoned  # type: ignore[method-assign]  # of this process only
    main("target")
