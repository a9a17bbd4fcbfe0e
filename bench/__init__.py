"""The benchmarks: every published measurement comes from a command here."""
