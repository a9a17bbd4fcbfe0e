"""From logits to tokens: distributions, the target's sampler output, the draft's proposals. Pure functions on tensors.

Nothing here depends on sessions, caches or messages. On the target's side the bits of a row's result never depend on
the other rows of a call.
"""
