"""Settings of all tests: Hypothesis without a deadline, since one pause of a busy machine would fail an example."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("specdec", deadline=None)
settings.load_profile("specdec")
