"""Models, their cache, and the one thread that owns both.

Draft and target run the same engine with different sampler functions. Nothing here depends on gRPC, asyncio or the
verification rules.
"""
