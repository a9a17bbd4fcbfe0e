"""Messages to one client, which must take each of them in time."""

from __future__ import annotations

import asyncio

import grpc

from specdec.errors import DeliveryStalled
from specdec.rpc.limits import READER_STALL_S_MAX


class Delivery:
    """Writes the messages of one call; one writer at a time."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context
        self._has_begun = False

    async def write(self, data: bytes) -> None:
        """Writes one message. Raises DeliveryStalled if the client has not taken it after READER_STALL_S_MAX.

        The call can still be aborted then: the client receives the status after the messages that it left unread.
        """
        try:
            async with asyncio.timeout(READER_STALL_S_MAX):
                if not self._has_begun:
                    # Not with the first message: while that is unread, gRPC would send the metadata again, and fail.
                    await self._context.send_initial_metadata(())
                    self._has_begun = True
                await self._context.write(data)
        except TimeoutError:
            raise DeliveryStalled(f"the reader took nothing for {READER_STALL_S_MAX:g} s") from None
