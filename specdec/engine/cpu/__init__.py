"""The CPU backend: steps on native kernels, each sum in one order, and the path without them.

A module outside imports `backend` and `kernels` only.
"""
