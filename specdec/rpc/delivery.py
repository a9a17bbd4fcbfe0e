"""Messages to one client, which must take each of them in time."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import grpc

from specdec.errors import DeliveryStalled
from specdec.rpc.limits import READER_STALL_S_MAX


class Delivery:
    """Writes the messages of one call, a context manager; one writer at a time, always the same task.

    One timer serves all writes of a call: it is set again for the write in progress when it is due, since a timer for
    every message costs more than the message's own fields.
    """

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._has_begun = self._is_stalled = False
        self._began_s: float | None = None  # the write in progress
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def write(self, data: bytes) -> None:
        """Writes one message. Raises DeliveryStalled if the client has not taken it after READER_STALL_S_MAX.

        The call can still be aborted then: the client receives the status after the messages that it left unread.
        """
        writer = asyncio.current_task()
        assert writer is not None
        self._began_s = self._loop.time()
        if self._timer is None:
            self._set_timer(self._began_s, writer)
        try:
            if not self._has_begun:
                # Not with the first message: while that is unread, gRPC would send the metadata again, and fail.
                await self._context.send_initial_metadata(())
                self._has_begun = True
            await self._context.write(data)
        except asyncio.CancelledError:
            if not self._is_stalled or writer.uncancel():  # cancelled by another, or by both
                raise
            reason = f"the reader took nothing for {READER_STALL_S_MAX:g} s"
            raise DeliveryStalled(f"{reason}; send the request again; a generation can be resumed") from None
        finally:
            self._began_s = None

    def _set_timer(self, began_s: float, writer: asyncio.Task[Any]) -> None:
        self._timer = self._loop.call_at(began_s + READER_STALL_S_MAX, self._on_timer, writer)

    def _on_timer(self, writer: asyncio.Task[Any]) -> None:
        """Cancels a write that is overdue; one that began since the timer was set gets its own time."""
        self._timer = None
        if self._began_s is None:
            return
        if self._loop.time() >= self._began_s + READER_STALL_S_MAX:
            self._is_stalled = True
            writer.cancel()
        else:
            self._set_timer(self._began_s, writer)
