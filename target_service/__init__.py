"""The target service: verification results for draft tokens, and no decision."""
