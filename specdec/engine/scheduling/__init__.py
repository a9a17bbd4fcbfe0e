"""The engine thread: feeds of all sessions, the rows of each step, and the run of a step."""
