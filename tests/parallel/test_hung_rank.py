"""A rank that hangs in a step while its other threads live: its pulses go on, so only the exchange can notice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from specdec.engine.parallel.group import Bounds, Ending
from specdec.engine.parallel.rank import ModelSource, load_leader
from specdec.engine.parallel.rank_config import RankPlace, listen
from specdec.engine.parallel.watch import Loss
from specdec.errors import RANK_LOST_EXIT_CODE, ReplicaUnavailable
from tests.support.engine_models import Driver, random_tokens
from tests.support.ranks import HOST

EXCHANGE_S, SILENCE_S = 1.0, 60.0
FOLLOWER = """
import itertools, threading
from specdec.engine.transformers_model import TransformersModel
forward, steps = TransformersModel.forward, itertools.count()

def planted(model, batch):
    if next(steps) == 1:
        threading.Event().wait()
    return forward(model, batch)

TransformersModel.forward = planted
from tests.support.ranks import main
main()
"""


def test_a_rank_that_hangs_in_a_step_ends_all(tiny_folder: Callable[..., Path]) -> None:
    """Claim: a rank whose step hangs is noticed by the others after their patience at an exchange; the step raises on
    rank 0, and the hung process is ended by its own watch.

    Conclusive: silence is allowed for a minute, and the rank answered the step before; the error names the rank.
    """
    listener, lost = listen(HOST), list[Loss]()
    place = RankPlace(0, 2, HOST, listener.getsockname()[1], listener)
    command = [sys.executable, "-c", FOLLOWER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as follower, ExitStack() as ending_all:
        ending_all.callback(follower.kill)
        folder = str(tiny_folder("llama"))
        print(json.dumps([folder, "float32", 1, 2, place.port, None]), file=follower.stdin, flush=True)
        ending = Ending(lost.append, Bounds(SILENCE_S, EXCHANGE_S), exit_grace_s=None)
        driver = Driver(load_leader(ModelSource(folder, "float32"), place, ending, lambda what, share: None))
        table, token_ids = driver.open(20), random_tokens(20, 3)
        driver.feed(table, token_ids[:10])
        with pytest.raises(ReplicaUnavailable, match="rank 1 did not answer an exchange"):
            driver.feed(table, token_ids[10:])
        assert follower.wait(20) == RANK_LOST_EXIT_CODE
    assert len(lost) == 1 and "did not answer an exchange" in lost[0].reason
