"""Exactness tests compute on tiny tensors with one thread: they neither wait for other tests nor slow them down."""

from __future__ import annotations

from tests.support.threads import one_thread  # noqa: F401
