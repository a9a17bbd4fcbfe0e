"""Fleets: routing on discrete events (`python -m tests.fleet`), moves of texts between real processes."""
