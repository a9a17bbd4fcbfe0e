"""Bursts of odd requests before ordinary ones, in a simulated service (bench/simulation.py).

Requests that are cancelled, whose text has one token, whose rows slow every step, that the draft refuses, whose draft
tokens are always wrong or always right, that come by the dozen or with long prompts, while target, draft and network
have seconds of trouble.
"""

from __future__ import annotations

import random
from dataclasses import replace

from bench.simulation import FixedService, Simulation, Stream, Text, World

KINDS = (
    *("cancels", "one token", "penalties", "refused", "wrong", "right", "flood", "prompts"),
    *("stalls", "slow draft", "slow network", "nothing"),
)
PHASE_S = 2.0, 12.0  # least and most seconds of two kinds together
COUNTS, FLOOD_COUNT = (1, 2, 4, 8, 16), 32  # most requests at a time
ROW_S = (0.005, 0.02, 0.1)  # by which a row of a request with penalties slows its step


class Bursts(Simulation):
    """A run whose ordinary streams begin when the bursts end, at `bursts_s`. Every other seed has texts without end."""

    def __init__(self, world: World, service: FixedService, seed: int, bursts_s: float) -> None:
        begun = replace(world, begins_s=(bursts_s,) * len(world.texts))
        if seed % 2 == 0:
            begun = replace(begun, texts=tuple(replace(text, token_count=1e9) for text in world.texts))
        super().__init__(begun, service, seed)
        self._random, self._bursts_s, self._network_s = random.Random(seed), bursts_s, world.network_s
        self._odd: list[Stream] = []
        self.after(0.0, self._phase)

    def _phase(self) -> None:
        """Begins some seconds of two kinds of trouble, or ends the bursts."""
        rng, left_s = self._random, self._bursts_s - self.now_s
        for stream in self._odd:
            if left_s <= 0 or rng.random() < 0.8:
                self.end(stream)
        kinds = {rng.choice(KINDS), rng.choice(KINDS)} if left_s > 0 else set()
        network_s = 10 ** rng.uniform(-1.5, 0.3) if "slow network" in kinds else self._network_s
        self.change(
            {"network_s": network_s, "draft_factor": 10 ** rng.uniform(1, 2.7) if "slow draft" in kinds else 1.0}
        )
        if left_s > 0:
            count = FLOOD_COUNT if "flood" in kinds else 0 if "nothing" in kinds else rng.choice(COUNTS)
            end_s = self.now_s + min(left_s, rng.uniform(*PHASE_S))
            self._go_on(kinds, count, rng.choice(ROW_S) if "penalties" in kinds else 0.0, end_s)

    def _go_on(self, kinds: set[str], count: int, row_s: float, end_s: float) -> None:
        """Begins a request of a phase if there are fewer than `count`, and may end one; then waits for the next."""
        rng = self._random
        if self.now_s >= end_s:
            self._phase()
            return
        self._odd = [stream for stream in self._odd if not stream.is_over]
        if "stalls" in kinds and rng.random() < 0.05:
            self.stall_s = 10 ** rng.uniform(-0.5, 0.7)
        if "cancels" in kinds and self._odd and rng.random() < 0.5:
            self.end(rng.choice(self._odd))
        elif len(self._odd) < count:
            acceptance = 0.0 if "wrong" in kinds else 1.0 if "right" in kinds else rng.choice((0.0, 0.3, 0.7))
            token_count = 1 if "one token" in kinds else int(10 ** rng.uniform(0.3, 2.7))
            prompt_rows = int(10 ** rng.uniform(1, 2.4)) if "prompts" in kinds else 4
            text = Text((acceptance,), token_count, prompt_rows, row_s, "refused" in kinds, is_repeated=False)
            self._odd.append(Stream(text))
            self.streams.append(self._odd[-1])
            self.begin(self._odd[-1])
        self.after(rng.uniform(0.005, 0.3), self._go_on, kinds, count, row_s, end_s)
