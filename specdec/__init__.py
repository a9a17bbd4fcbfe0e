"""specdec: exact speculative decoding across machines."""

__version__ = "0.1.0"
