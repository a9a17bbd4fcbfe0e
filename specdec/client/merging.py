"""Several streams read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yields what all streams yield as it comes, each with the number of its stream; closes all at its end. Raises the
    first error of one."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T | None, Exception | None]] = asyncio.Queue(len(streams))

    async def read(index: int) -> None:
        try:
            async with aclosing(streams[index]) as own:
                async for item in own:
                    await queue.put((index, item, None))
        except Exception as error:
            await queue.put((index, None, error))
        else:
            await queue.put((index, None, None))

    tasks = [asyncio.create_task(read(index)) for index in range(len(streams))]
    try:
        open_count = len(streams)
        while open_count:
            index, received, error = await queue.get()
            if error is not None:
                raise error
            if received is None:
                open_count -= 1
            else:
                yield index, received
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
