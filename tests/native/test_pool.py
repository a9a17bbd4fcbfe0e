"""The pool of threads of the native kernels, by itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from specdec.engine.cpu.compile_kernels import SOURCES, NotCompiled, find_compiler

PROGRAM = Path(__file__).with_name("pool.c")
TIMEOUT_S = 120


@pytest.mark.more
@pytest.mark.parametrize("sanitizer", ["", "thread"])
def test_a_thread_holds_up_the_part_that_it_has_taken_and_no_other(tmp_path: Path, sanitizer: str) -> None:
    """Claim: every part of a job runs once, on 2 to 4 threads and in 2 to 64 parts, before the caller goes on; a thread
    that cannot go on in its part leaves all others to the rest.

    Conclusive: 60,000 jobs count their parts, without atomics too, which the thread sanitizer checks. A held part waits
    for the seven others: were they divided beforehand, half of them would wait for its own thread, and for ever.
    """
    program = tmp_path / "pool"
    flags = ["-O1", "-g", *([f"-fsanitize={sanitizer}"] if sanitizer else [])]
    sources = [str(PROGRAM), str(SOURCES / "parallel.c")]
    try:
        find_compiler().run("-std=gnu11", "-pthread", *flags, f"-I{SOURCES}", *sources, "-o", str(program))
    except NotCompiled as error:
        pytest.skip(f"the compiler makes no such program: {error}")
    done = subprocess.run([program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if "unexpected memory mapping" in done.stderr or "personality" in done.stderr:
        pytest.skip(done.stderr.splitlines()[0])
    assert (done.returncode, done.stdout, done.stderr) == (0, "wrong 0\n", "")
