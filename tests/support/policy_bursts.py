"""Odd requests before ordinary ones, in a simulated service (tests/support/simulation.py).

Requests that are cancelled, whose text has one token, whose rows slow every step, that the draft refuses, whose draft
tokens are always wrong or always right, that come by the dozen or with long prompts or stall a step, while draft and
network have seconds of trouble.
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.support.simulation import Text, World

KINDS = (
    *("cancels", "one token", "penalties", "refused", "wrong", "right", "flood", "prompts"),
    *("stalls", "slow draft", "slow network", "nothing"),
)
PHASE_S = 2.0, 12.0  # least and most seconds of two kinds together
COUNTS, FLOOD_COUNT = (1, 2, 4, 8, 16), 32  # requests at a time, about
TOKEN_S, GAP_MIN_S = 0.02, 0.05  # of a request's text, about; between two requests
ROW_S = (0.005, 0.02, 0.1)  # by which a row of a request with penalties slows its step


def with_bursts(world: World, bursts_s: float, seed: int) -> World:
    """Returns the world with its own streams beginning after `bursts_s` of odd requests."""
    rng, began_s = random.Random(seed), 0.0
    requests, changes = [(bursts_s, text) for text in world.texts], []
    while began_s < bursts_s:
        kinds, end_s = {*rng.choices(KINDS, k=2)}, min(began_s + rng.uniform(*PHASE_S), bursts_s)
        network_s = 10 ** rng.uniform(-1.5, 0.3) if "slow network" in kinds else world.network_s
        draft_factor = 10 ** rng.uniform(1, 2.7) if "slow draft" in kinds else 1.0
        changes.append((began_s, {"network_s": network_s, "draft_factor": draft_factor}))
        count = FLOOD_COUNT if "flood" in kinds else 0 if "nothing" in kinds else rng.choice(COUNTS)
        row_s = rng.choice(ROW_S) if "penalties" in kinds else 0.0
        at_s = began_s if count else end_s
        while at_s < end_s:
            acceptance = 0.0 if "wrong" in kinds else 1.0 if "right" in kinds else rng.choice((0.0, 0.3, 0.7))
            token_count = 1 if "one token" in kinds else int(10 ** rng.uniform(0.3, 2.7))
            prompt_rows = int(10 ** rng.uniform(1, 2.4)) if "prompts" in kinds else 3
            prompt_s = 10 ** rng.uniform(-0.5, 0.7) if "stalls" in kinds and rng.random() < 0.05 else 0.0
            is_late = rng.random() < 0.2  # goes on beside the next kinds
            life_s = rng.uniform(0, 1) if "cancels" in kinds else (bursts_s if is_late else end_s) - at_s
            text = Text((acceptance,), token_count, prompt_rows, prompt_s, row_s, "refused" in kinds, False, life_s)
            requests.append((at_s, text))
            at_s += GAP_MIN_S + rng.uniform(0, 2) * token_count * TOKEN_S / count
        began_s = end_s
    changes.append((bursts_s, {"network_s": world.network_s, "draft_factor": 1.0}))
    begins_s, texts = zip(*requests)
    return replace(world, texts=texts, begins_s=begins_s, changes=tuple(changes))
