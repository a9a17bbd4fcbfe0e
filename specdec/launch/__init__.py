"""Services as child processes: their start, their ready events, their restarts."""
