"""Drafters of tests run in the test's own process."""

from __future__ import annotations

from tests.support.threads import one_thread  # noqa: F401
