"""The common parts of the draft and the target service: sessions, the stream, the start of the process."""
