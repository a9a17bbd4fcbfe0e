"""The models and tables of forecasts are tiny: one thread computes them, and a second would wait for it."""

from __future__ import annotations

from tests.support.threads import one_thread  # noqa: F401
