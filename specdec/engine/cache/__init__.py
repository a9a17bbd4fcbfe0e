"""The cache: blocks of sequences, their sharing as prefixes, and the length up to which they are valid."""
