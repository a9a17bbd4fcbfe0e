"""Distillation: the target's own text and distributions, a student that learns them, and its acceptance."""
