"""Settings of all tests: Hypothesis without a deadline, since one pause of a busy machine would fail an example; and
the gate's time for tests marked `more`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("specdec", deadline=None)
settings.load_profile("specdec")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test marked `more` that would begin after the second since 1970 that `.ci/run` names, and says so."""
    until = os.environ.get("TESTS_MORE_UNTIL_S")
    if until and item.get_closest_marker("more") and time.time() > float(until):
        pytest.skip("the gate's time is up on this machine; `make test-more` runs it")


@pytest.fixture(autouse=True)
def own_start_folder() -> Iterator[None]:
    """Ends what a command that a test runs in this process sets for its children: those of other tests find `tests` in
    the folder that they are started in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONSAFEPATH", raising=False)
        yield
        os.environ.pop("PYTHONSAFEPATH", None)
