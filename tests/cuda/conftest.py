"""The code of a GPU, run here in the test's own process."""

from __future__ import annotations

from tests.support.threads import one_thread  # noqa: F401
