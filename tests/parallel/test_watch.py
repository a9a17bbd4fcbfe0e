"""The watch over other ranks, on real sockets."""

from __future__ import annotations

import socket

from specdec.engine.parallel.watch import Loss, Watch

ENDED_S = 5.0


def test_ranks_that_were_told_to_stop_are_not_lost() -> None:
    """Claim: a rank that ends after rank 0 expects it is no loss, one that ends before is.

    Source: in a drain a rank ended before rank 0 had stopped its watch, and the service's exit code was that of a lost
    rank. Conclusive: the connection is closed before `stop` is called, in both cases, and the watch has ended.
    """
    found: dict[bool, list[Loss]] = {True: [], False: []}
    for is_expected, losses in found.items():
        ours, theirs = socket.socketpair()
        watch = Watch({1: ours}, losses.append, exit_grace_s=None)
        if is_expected:
            watch.expect_ends()
        theirs.close()
        watch._thread.join(ENDED_S)
        assert not watch._thread.is_alive()
        watch.stop()
    assert found[True] == [] and [loss.rank for loss in found[False]] == [1]
