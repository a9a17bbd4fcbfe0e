"""`specdec` as the first process of a container, where the kernel ignores signals without a handler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.engine.parallel.rank_config import listen
from specdec.folders import EMBEDDED_MODELS

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child"]
is_allowed = subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not is_allowed, reason="making a process namespace is not allowed here")
def test_sigterm_ends_a_service_that_is_still_loading():
    """Claim: a pod that is deleted while its service loads ends before its grace period is over.

    Conclusive: rank 0 of two machines waits for the other one for ten minutes; it is the first process of a namespace,
    and without a handler of its own SIGTERM would not reach it.
    """
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
    command = ["target", "--model", str(EMBEDDED_MODELS / "target"), "--port", "0", "-tp", "2", "--nnodes", "2"]
    command += ["--node-rank", "0", "--master-port", str(port), "--log-level", "error"]
    launcher = subprocess.Popen([*UNSHARE, sys.executable, "-m", "specdec.cli", *command], text=True)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(3)
        (first,) = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text(encoding="ascii").split()
        os.kill(int(first), signal.SIGTERM)
        assert launcher.wait(20) == 128 + signal.SIGTERM
    finally:
        launcher.kill()
        launcher.wait()
