"""Tensor parallelism: one model over several processes (ranks), its split, its sums over ranks, and lost ranks.

Rank 0 plans and samples; the other ranks run the same forward on their share of the weights. Nothing here depends on
gRPC, sessions, scheduling or the way the processes are started.
"""
