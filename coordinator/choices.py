"""The generations of one request, its choices, as one stream of events.

The first one reads the prompt, and tells its log-probabilities for all; the others begin when it has its first token:
then the prompt is in the cache of its target, and each computes at most the prompt's last block again. From there on
each is a generation as any other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from specdec.coordinator.generation import Generation
from specdec.coordinator.output import Ending
from specdec.errors import SpecdecError
from specdec.protocol.report import Event, Finished, Started
from specdec.protocol.types import PromptLogprobs


class Choices:
    """All generations of a request, which have one reader: `events`. `ending`: of a single one, if its resumed tokens
    reached its end."""

    def __init__(self, generations: Sequence[Generation], ending: Ending | None = None) -> None:
        self.generations = generations
        self._ending = ending

    def begin(self) -> None:
        """Begins the first one; as `Generation.begin`."""
        self.generations[0].begin(self._ending)

    async def events(self) -> AsyncGenerator[tuple[int, Event], None]:
        """Yields the events of all, each with the number of its choice; all `started` come before any other.

        Raises the error of the first choice at once if it comes before its first token, when no other has begun; of
        others the first error, when the rest have ended.
        """
        first, *others = self.generations
        if not others:
            event: Event | SpecdecError | None = None
            while not isinstance(event, Finished):
                event = await first.next_event()
                yield 0, event
            return
        running = dict(enumerate(self.generations))
        failed: SpecdecError | None = None
        while running:
            is_idle = True
            for choice, generation in list(running.items()):
                event = generation.take_event()
                if event is None:
                    continue
                is_idle = False
                if others and choice == 0 and not isinstance(event, (Started, PromptLogprobs)):
                    if isinstance(event, SpecdecError):
                        raise event
                    for other in others:
                        other.follow(first)
                    others = []
                if isinstance(event, (SpecdecError, Finished)):
                    del running[choice]
                if isinstance(event, SpecdecError):
                    failed = failed or event
                    continue
                for own in range(len(self.generations)) if isinstance(event, PromptLogprobs) else (choice,):
                    yield own, event
            if is_idle:
                await first.reader.wait()
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Stops all work for the request; idempotent."""
        for generation in self.generations:
            generation.close()
