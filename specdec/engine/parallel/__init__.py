"""One model over several processes: which rank holds what, how partial sums meet, and what happens when one is lost.

Rank 0 plans, samples and answers; the other ranks run the same forward on their share of the weights and decide
nothing. Nothing here knows gRPC, sessions or scheduling, and nothing depends on how the processes were started.
"""
