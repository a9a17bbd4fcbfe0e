"""A step of the engine on a CPU beside its limit, the reading of its weights, and beside llama.cpp."""
