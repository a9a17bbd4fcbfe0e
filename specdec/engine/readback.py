"""The few numbers of every step that the host needs: the best token of each row, and whether all values are finite.

They lie together on the step's device and come to the host in one copy: at the first read, or beside what a sampler
fetches. Reading them waits for the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Readback:
    """The best ids and finite flags of one step, to be read before the next step of its model.

    `numbers` [logits + flags] int64: of each row with logits the lowest id with its largest logit, then the flags of
    all rows, then those of the rows with logits.
    """

    def __init__(self, numbers: torch.Tensor, logit_count: int):
        self.numbers = numbers
        self._logit_count = logit_count
        self._read: list[int] | None = None

    def take(self, numbers: Sequence[float]) -> None:
        """Takes the numbers that another's copy brought."""
        self._read = [int(number) for number in numbers]

    def _on_host(self) -> list[int]:
        if self._read is None:
            self._read = self.numbers.tolist()
        return self._read

    def best_ids(self) -> list[int]:
        """Returns the best id of each row with logits, and of padding rows behind them; any id if not finite."""
        return self._on_host()[: self._logit_count]

    def flags(self) -> list[bool]:
        """Returns whether each row, then whether each row's logits, are finite."""
        return [number != 0 for number in self._on_host()[self._logit_count :]]
