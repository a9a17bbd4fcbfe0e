"""The target service: evidence about draft tokens, and no decision."""
