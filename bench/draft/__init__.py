"""The draft's step, measured without its service."""
