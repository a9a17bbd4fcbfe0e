"""Grammars of requests: compiled to matchers, which tell the legal tokens along a path (llguidance; docs/grammars.md)."""
