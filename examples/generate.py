"""One text from a coordinator, streamed: `python examples/generate.py [PROMPT] [HOST:PORT]`.

A stream that is lost is asked for again from its last token on, with the seed in force; no token is lost or doubled.
"""

import asyncio
import sys

from specdec.client.events import Finished
from specdec.client.request import make_request
from specdec.client.stream import Client
from specdec.protocol.report import Delta


async def main(prompt: str = "def main():", address: str = "127.0.0.1:50051") -> None:
    request = make_request(prompt, max_tokens=64, temperature=0.7, seed=1)
    async with Client(address) as client:
        async for event in client.generate(request):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)
            elif isinstance(event, Finished):
                print(f"\n[{event.statistics.draft_acceptance_rate:.0%} of the draft tokens accepted]")


asyncio.run(main(*sys.argv[1:]))
