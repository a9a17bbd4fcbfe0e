"""Speculation changes no token, at length: `python -m tests.sameness`."""
