"""A feature head on a target: an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840)."""
