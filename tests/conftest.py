"""Settings of all tests: Hypothesis without a deadline, since one pause of a busy machine would fail an example; and
the gate's time for tests marked `more`; and the order in which workers take files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.support.order import scheduler_of

settings.register_profile("specdec", deadline=None)
settings.load_profile("specdec")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable[..., None]) -> Any:
    """Long files come first, and files that share what is started once stay together."""
    return scheduler_of(config, log)


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
