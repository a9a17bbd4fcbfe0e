"""Stage `ranks`: two ranks of a model on one device, which add their parts in symmetric memory.

On one device their kernels take turns, so it is right or wrong, but not quick. Where ranks cannot exchange in symmetric
memory (a CPU, an engine without the setting) they do it by the way that the engine has.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.gpu_models import Shape, write_folder
from bench.gpu_session.texts import dtype_of, random_ids
from bench.gpu_session.timing import host_s
from bench.gpu_session.worker import Session
from specdec.engine.interface import CausalModel, Chunk, RaggedBatch
from specdec.engine.loading.devices import default_block_size
from specdec.engine.loading.model import load_model
from specdec.engine.parallel.group import Ending
from specdec.engine.parallel.rank import ModelSource, load_leader, run_follower
from specdec.engine.parallel.rank_config import RankPlace, listen

SHAPE = Shape("1B, 4 layers", 2048, 4, 32, 8, 8192, 32000, is_tied=False, positions=2048)
SMALL = Shape("tiny", 128, 1, 4, 2, 256, 256, is_tied=False, positions=256)
HOST, RANKS = "127.0.0.1", 2
PROMPT, ROWS = 40, 8
NEAR = 0.05  # of the largest logit: parts are rounded in other places than on one rank


def run(session: Session) -> None:
    """Reports how many rows of steps of 8 have the bits of steps of one, and how far they are from one rank's. Raises
    RuntimeError for logits that are no roundings of one rank's."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # read by torch, in the other rank too
    shape = SMALL if session.is_small else SHAPE
    with tempfile.TemporaryDirectory(prefix="specdec-ranks-") as name:
        folder, dtype = (
            write_folder(Path(name), shape, dtype_of(session)),
            str(dtype_of(session)).removeprefix("torch."),
        )
        alone = texts_of(load_model(str(folder), dtype, device=str(session.device)), shape, session.device)[0]
        is_symmetric = not session.is_small  # there is none of CPUs
        source = ModelSource(str(folder), dtype, str(session.device), symmetric_memory=is_symmetric)
        listener = listen(HOST)
        port = listener.getsockname()[1]
        other = multiprocessing.get_context("spawn").Process(
            target=follow, args=(source, port, torch.get_num_threads())
        )
        other.start()
        place = RankPlace(0, RANKS, HOST, port, listener)
        leader = load_leader(source, place, Ending(lambda loss: None), lambda what, share: None)
        together, step_ms = texts_of(leader, shape, session.device)
        leader.close()
        other.join()
    equal = int((together[0] == together[1]).all(1).sum())
    off = float((together[0] - alone[0]).abs().max() / alone[0].abs().max())
    session.add(
        ranks=RANKS, model=shape.name, symmetric_memory=is_symmetric, rows=ROWS, equal=equal, off=off, step_ms=step_ms
    )
    if not off <= NEAR:
        raise RuntimeError(f"logits of {RANKS} ranks are {off:.3g} of the largest away from those of one")


def follow(source: ModelSource, port: int, threads: int) -> None:
    """Runs rank 1 in a process of its own, with as many threads as rank 0: ranks must agree."""
    torch.set_num_threads(threads)
    run_follower(source, RankPlace(1, RANKS, HOST, port))


def texts_of(model: CausalModel, shape: Shape, device: torch.device) -> tuple[Sequence[torch.Tensor], float]:
    """Logits of the ROWS rows behind a prompt, in one step and one by one, and the median time of a row's step.
    # [rows, vocab] float32"""
    block_size = default_block_size(device)
    model.allocate(1 + -(-(PROMPT + ROWS) // block_size), block_size)
    ids, blocks = random_ids(PROMPT + ROWS, shape.vocabulary), range(1, 1 + -(-(PROMPT + ROWS) // block_size))

    def step(start: int, end: int) -> torch.Tensor:
        logits: torch.Tensor = model.forward(RaggedBatch((Chunk(blocks, start, ids[start:end], end - start),))).logits
        return logits.clone()

    step(0, PROMPT)
    whole = step(PROMPT, PROMPT + ROWS)
    singles = torch.cat([step(place, place + 1) for place in range(PROMPT, PROMPT + ROWS)])
    times_s = [host_s(lambda: step(PROMPT, PROMPT + 1)) for _ in range(5)]
    return (whole, singles), statistics.median(times_s) * 1e3
