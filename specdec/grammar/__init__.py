"""Grammars of requests, compiled to matchers, which tell the legal tokens along a path (docs/grammars.md)."""
