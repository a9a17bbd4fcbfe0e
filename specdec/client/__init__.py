"""A coordinator's user: requests, their streams as events, and what came of a text."""
