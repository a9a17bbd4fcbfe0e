"""The engine alone, without services: its steps, sequences side by side, and its sampler."""
