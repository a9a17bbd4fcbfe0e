"""Law tests compute on tiny tensors: one thread, so that they neither wait for others nor make them wait."""

from __future__ import annotations

from tests.support.threads import one_thread  # noqa: F401
