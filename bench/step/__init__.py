"""A step of the engine on a CPU beside its limit, and what llama.cpp needs to serve the same weights."""
