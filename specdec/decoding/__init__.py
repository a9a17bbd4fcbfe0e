"""From logits to tokens: the sampled law, the target's evidence, the draft's proposals. Pure functions on tensors.

Nothing here knows of sessions, caches or messages. The bits of a row's result never depend on the other rows of a call.
"""
