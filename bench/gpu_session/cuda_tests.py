"""Stage `cuda_tests`: the tests of the device's code, on the device where they load models."""

from __future__ import annotations

import os

import pytest

from bench.gpu_session.worker import Session
from bench.runner import ROOT

# Interpreted tests of kernels run on any processor; this package's own test would start it again.
LEFT_OUT = ("tests/cuda/kernels", "tests/cuda/test_gpu_session.py")
WHOLE_STEPS = ("more and not slow", ("tests/cuda/test_step.py",))  # long in the interpreter alone
FEW = ("tests/cuda/test_step_plan.py",)


class Counts:
    """A plugin of pytest that reports each file's tests when they have run."""

    def __init__(self, session: Session):
        self._session = session
        self._file = ""
        self._outcomes: dict[str, int] = {}
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts one test, or what failed before or after it."""
        file, _, name = report.nodeid.partition("::")
        if file != self._file:
            self.tell()
            self._file = file
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.outcome] = self._outcomes.get(report.outcome, 0) + 1
        if report.failed:
            self._failed.append(f"{name}: {report.longreprtext.strip().splitlines()[-1]}")

    def tell(self) -> None:
        """Reports the file that is done."""
        if self._outcomes:
            self._session.add(file=self._file, **self._outcomes, failures=self._failed)
        self._outcomes, self._failed = {}, []


def run(session: Session) -> None:
    """Reports the outcomes of each file. Raises RuntimeError unless all passed."""
    os.chdir(ROOT)
    counts = Counts(session)
    everything = ("tests/cuda", *(f"--ignore={path}" for path in LEFT_OUT))
    runs = (
        [("not slow and not more", FEW)] if session.is_small else [("not slow and not more", everything), WHOLE_STEPS]
    )
    codes = []
    for marks, paths in runs:
        codes.append(pytest.main(["-q", "-m", marks, "-p", "no:cacheprovider", *paths], plugins=[counts]))
        counts.tell()
    if any(code != pytest.ExitCode.OK for code in codes):
        raise RuntimeError(f"pytest ended with {', '.join(str(int(code)) for code in codes)}")
