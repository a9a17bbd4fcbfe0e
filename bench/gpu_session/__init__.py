"""Measurements and checks of the engine on one GPU in one command: see `__main__`."""
