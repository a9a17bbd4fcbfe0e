"""A list that tells how much of it was read."""

from __future__ import annotations


class ReadList(list):
    """Counts the items read from it, by index, slice or iteration."""

    read_count = 0

    def __iter__(self):
        self.read_count += len(self)
        return super().__iter__()

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.read_count += len(found) if isinstance(index, slice) else 1
        return found
