"""Texts under grammars through running services: the proof that they are valid."""
