"""Traces read back from files and collectors, and what they say of a request."""
