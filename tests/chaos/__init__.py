"""Proofs by fault: real services, real signals, floods and malformed input, each with its pass conditions.

    python -m tests.chaos --list          the proofs
    python -m tests.chaos PROOF --help    one of them
    python -m tests.chaos PROOF           runs it; exit 1 where a condition does not hold

A proof is a module of `tests.chaos.proofs`: `add_options(parser)` declares its sizes, `prove(asked, console)` runs it
and returns one bar for each condition. `tests/chaos/test_*.py` run short forms.
"""
