"""The protocol as values: no socket, no clock, no torch, no global randomness."""
