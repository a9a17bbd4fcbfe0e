"""What the draft and the target service have in common: held sessions, the stream, the start of the process."""
