"""A target and a draft on table models with planted faults that else take months, hours or a large model: a clock that
leaps, a long step, a row's price, a narrow field, a short minute. For tests of what bounds them.

Run as `python -m tests.support.planted_pair target FLAGS`, or `draft FLAGS`, as `specdec` is; a target prints SLOW_LINE
when a slow step begins, and FAST_LINE when it ends.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

from specdec.cli.main import main
from specdec.engine.interface import RaggedBatch, StepOutput
from specdec.engine.scheduling import runner
from specdec.engine.table_model import TableModel
from specdec.protocol.items import Nodes
from specdec.replica import handler, stream

AGES, SLOW = [7, 1, 7], [7, 2, 7]  # prompts
AGES_S = 5000.0  # beyond 32 bits of microseconds
SLOW_S, SLOW_LINE, FAST_LINE = 1.5, "slow", "fast"
ROW_S = 0.0002  # a target's price of a row: a step grows with its rows, as on a machine that computes
EPOCH_MAX = 60  # in place of 2^32 - 1
HELD_S = 1.5  # in place of a minute

forward, item_to_bytes = TableModel.forward, stream.item_to_bytes
leapt_s = 0.0  # of the clock that measures forwards


def dear(model: TableModel, batch: RaggedBatch) -> StepOutput:
    """`TableModel.forward` of a target: a row has its price, and two prompts take long, one by the clock only."""
    global leapt_s
    prompts = [list(chunk.token_ids) for chunk in batch.chunks if chunk.start == 0]
    time.sleep(ROW_S * sum(len(chunk.token_ids) for chunk in batch.chunks))
    if SLOW in prompts:
        print(SLOW_LINE, flush=True)
        time.sleep(SLOW_S)
        print(FAST_LINE, flush=True)
    leapt_s += AGES_S * (AGES in prompts)
    return forward(model, batch)


def narrow(response: type, answer: Any) -> bytes:
    """`item_to_bytes` with a small field for the epoch, which raises as protobuf does."""
    if isinstance(answer, Nodes) and answer.epoch > EPOCH_MAX:
        raise ValueError(f"Value out of range: {answer.epoch}")
    return item_to_bytes(response, answer)


if __name__ == "__main__":
    if sys.argv[1] == "draft":
        stream.item_to_bytes = narrow
    else:
        TableModel.forward, handler.HELD_S = dear, HELD_S
        runner.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + leapt_s)
    main()
