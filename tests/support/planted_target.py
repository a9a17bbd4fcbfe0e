"""A target on a table model with planted faults: the last token of a step chooses one. For tests of what watches.

Run as `python -m tests.support.planted_target FOLDER [SILENCE_S [METRICS_ADDRESS]]` it prints its address when it
serves, and SLOW_LINE when a slow step has begun. SILENCE_S: the longest silence of a coordinator.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
import time

from specdec import process_watch
from specdec.config import TargetSettings
from specdec.engine.interface import RaggedBatch, StepOutput
from specdec.engine.table_model import TableModel
from specdec.protocol.items import VerificationResult
from specdec.replica import stream
from specdec.replica.stream import ReplicaStream
from specdec.target_service.service import run

PLAIN, SLOW, HANGS, LOST, LOCKS, LOOP_HANGS, DIES = 1, 2, 3, 4, 5, 6, 0  # token ids
LOCK_HELD_S_MAX = 2.0
SLOW_LINE = "slow"

forward, reply = TableModel.forward, ReplicaStream.reply
is_lost = False  # the answers of the last step
streams: set[ReplicaStream] = set()  # that were answered


def planted(model: TableModel, batch: RaggedBatch) -> StepOutput:
    """`TableModel.forward`; slow: a second in ten parts, so that a pause of the process ends in its middle.
    Lost: the answers of this step are not sent. Locks: a call that never returns the interpreter's lock. Loop hangs:
    the event loop sleeps, other threads run. Dies: the engine thread ends, as no handler of errors knows this one."""
    global is_lost
    last = {chunk.token_ids[-1] for chunk in batch.chunks}
    if SLOW in last:
        print(SLOW_LINE, flush=True)
        for _ in range(10):
            time.sleep(0.1)
    is_lost = LOST in last
    if LOOP_HANGS in last:
        for stream in list(streams):
            stream._loop.call_soon_threadsafe(time.sleep, 3600)
    if LOCKS in last:
        ctypes.PyDLL(None).sleep(3600)
    if DIES in last and streams:  # the warm-up has this token too
        raise SystemExit
    if HANGS in last:
        threading.Event().wait()
    return forward(model, batch)


def reply_unless_lost(own: ReplicaStream, item: object) -> None:
    """`ReplicaStream.reply`, without the verification results of a step whose answers are lost."""
    streams.add(own)
    if not (is_lost and isinstance(item, VerificationResult)):
        reply(own, item)


if __name__ == "__main__":
    TableModel.forward, ReplicaStream.reply = planted, reply_unless_lost
    folder, silence_s, page = (*sys.argv[1:], *(None, None))[:3]
    process_watch.HELD_S_MAX = LOCK_HELD_S_MAX
    stream.SILENCE_S_MAX = float(silence_s or stream.SILENCE_S_MAX)
    settings = TargetSettings(model=folder, port=0, threads=1, device="cpu", metrics_address=page)
    asyncio.run(run(settings, lambda address: print(address, flush=True)))
