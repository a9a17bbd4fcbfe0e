"""Models, their cache, and the one thread that owns both.

Draft and target run the same engine; what they make of logits is given to it as a function. Nothing here knows gRPC,
asyncio or the rules of verification.
"""
