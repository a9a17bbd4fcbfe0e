"""A channel to a coordinator, and `Generate` over it: a stream that is lost is resumed, so that its reader sees one
text.

Resumed is what ends after its start for a reason that waiting can mend: a lost target or coordinator, a full one, a
reader that paused for too long. It is asked for again with the tokens that came and the seed in force, so the text is
the undisturbed one. Nothing is repeated before the start: a wrong address is told at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from specdec.client.events import Event, event_of
from specdec.client.merging import merged
from specdec.client.request import Request
from specdec.client.run import Run
from specdec.client.sums import summed
from specdec.errors import CacheExhausted, DeliveryStalled, Mismatch, ReplicaUnavailable
from specdec.protocol.fields import N_MAX
from specdec.protocol.limits import UINT64_MAX
from specdec.rpc.client import call_stream, open_channel
from specdec.settings import TlsSettings
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from specdec.v1 import types_pb2 as types_pb

METHOD = "/specdec.v1.CoordinatorService/Generate"
RESUME_S = 60.0  # a service that `specdec serve` restarts is back by then
RETRY_S = 1.0


class Client:
    """A coordinator's user; `async with` closes its channel.

    `resume_s`: how long a lost stream is asked for again, from its last token on; 0: its error is raised at once, as
    those want it who measure.

    Choices of a request with several share a stream; if it is lost each of them that has not finished is resumed as a
    single text.
    """

    def __init__(self, address: str, tls: TlsSettings | None = None, resume_s: float = RESUME_S) -> None:
        """`address`: HOST:PORT. Raises ConfigError when a TLS file cannot be read."""
        self._channel = open_channel(address, tls or TlsSettings())
        self._resume_s = resume_s

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def messages(
        self, request: Request, timeout_s: float | None = None
    ) -> AsyncGenerator[coordinator_pb.GenerateResponse, None]:
        """Yields the messages of one text, one `started` among them, or of all its choices. Close it to cancel the
        request. Raises the coordinator's SpecdecError, and Mismatch if a text could only be resumed by another model.
        """
        end_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        async with aclosing(self._messages(so_far(request, self._resume_s > 0), end_s)) as responses:
            async for response in responses:
                yield response

    async def _messages(
        self, text: Continuation | Choices, end_s: float
    ) -> AsyncGenerator[coordinator_pb.GenerateResponse, None]:
        lost_s: float | None = None
        while True:
            left_s = None if end_s == float("inf") else max(0.0, end_s - time.monotonic())
            try:
                answers = call_stream(self._channel, METHOD, text.request, coordinator_pb.GenerateResponse, left_s)
                async with aclosing(answers):
                    async for response in answers:
                        if response.HasField("delta") or response.HasField("prompt_logprobs"):
                            lost_s = None
                        if text.take(response):
                            yield response
                if text.is_over:
                    return
                raise ReplicaUnavailable("the stream ended before the text")
            except (ReplicaUnavailable, CacheExhausted, DeliveryStalled) as error:
                if text.is_over:
                    return
                now_s = time.monotonic()
                lost_s = now_s if lost_s is None else lost_s
                wait_s = float(getattr(error, "retry_after_s", 0.0) or RETRY_S)
                if not text.may_resume or now_s + wait_s > min(lost_s + self._resume_s, end_s):
                    raise
            await asyncio.sleep(wait_s)
            if isinstance(text, Choices):
                async with aclosing(merged([self._messages(one, end_s) for one in text.unfinished()])) as responses:
                    async for _, response in responses:
                        yield response
                return

    async def generate(self, request: Request, timeout_s: float | None = None) -> AsyncGenerator[Event, None]:
        """Yields the events of one text: `Started`, `Delta`s, `Finished`. Otherwise as `messages`; `choices` is for a
        request with several."""
        async with aclosing(self.choices(request, timeout_s)) as events:
            async for _, event in events:
                yield event

    async def choices(
        self, request: Request, timeout_s: float | None = None
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """Yields the events of all choices of a request, each with the number of its choice. Otherwise as
        `messages`."""
        async with aclosing(self.messages(request, timeout_s)) as responses:
            async for response in responses:
                yield response.choice, event_of(response)

    async def read(self, request: Request, timeout_s: float | None = None, into: Run | None = None) -> Run:
        """Returns a text that has ended; `into` is filled while it streams. Raises as `messages` does."""
        run = into or Run()
        async with aclosing(self.generate(request, timeout_s)) as events:
            async for event in events:
                run.take(event)
        return run

    async def read_choices(self, request: Request, timeout_s: float | None = None) -> list[Run]:
        """Returns all choices of a request, which have ended. Raises as `messages` does."""
        runs = [Run() for _ in range(max(1, request.sampling.n))]
        async with aclosing(self.choices(request, timeout_s)) as events:
            async for choice, event in events:
                runs[choice].take(event)
        return runs


class Continuation:
    """What came of a text: `request` goes on with it. A drawn seed, or the rule REJECTION, stays that of the start;
    statistics are of all streams."""

    def __init__(self, request: Request, sums_statistics: bool, choice: int = 0) -> None:
        """`request` is copied. `sums_statistics`: as its deltas tell them, which costs the coordinator some 20 µs
        each; false: the end tells those of the last stream. `choice`: its number among those of its request."""
        self.request = Request()
        self.request.CopyFrom(request)
        if sums_statistics:
            self.request.speculative.report_statistics = True
        self.choice = choice
        self.is_over = False
        self.may_resume = False  # it has started, or its request has
        self.started: coordinator_pb.Started | None = None
        self._model_digest = ""  # empty before the start
        self._part: coordinator_pb.Statistics | None = None  # of the stream so far
        self._lost: list[coordinator_pb.Statistics] = []  # of streams before it
        self._prompt_count = 1  # prompt tokens whose log-probabilities came; the first has none

    def take(self, response: coordinator_pb.GenerateResponse) -> bool:
        """Adds a message; returns whether it is new to the reader: the start of a resumed text is not, unless numerics
        are others, and it becomes `moved` then. Raises Mismatch for the start of another model."""
        if self.choice:
            response.choice = self.choice
        self.is_over = self.is_over or response.HasField("finished")
        if response.HasField("prompt_logprobs"):
            return self._takes_prompt(response.prompt_logprobs)
        if response.HasField("delta"):
            self.request.resume.output_token_ids.extend(response.delta.token_ids)
            if response.delta.HasField("statistics"):
                self._part = response.delta.statistics
        elif response.HasField("finished") and self._lost:
            finished = response.finished
            finished.statistics.CopyFrom(summed([*self._lost, finished.statistics], finished.usage.output_tokens))
        elif response.HasField("moved") and self.started is not None:
            moved = coordinator_pb.Started()
            moved.CopyFrom(self.started)
            moved.numerics.CopyFrom(response.moved.numerics)
            self.started = moved
        if not response.HasField("started"):
            return True
        before, own = self.started, response.started
        if self._model_digest not in ("", own.model_digest):
            raise Mismatch("the text cannot be resumed: the target is another model now")
        self.started = own
        if self._part is not None:
            self._lost.append(self._part)
            self._part = None
        self.keep(own, own.seed)
        if before is None:
            return True
        has_moved = before.numerics != own.numerics
        if has_moved:
            index = len(self.request.resume.output_token_ids)
            response.moved.CopyFrom(coordinator_pb.Moved(first_output_index=index, numerics=own.numerics))
        return has_moved

    def _takes_prompt(self, part: types_pb.PromptLogprobs) -> bool:
        """Cuts what the reader has off a part of the prompt's log-probabilities; returns whether any is left."""
        known = min(max(0, self._prompt_count - part.first_prompt_index), len(part.token_ids))
        if known:
            width = len(part.top_token_ids) // len(part.token_ids)
            for name, count in (("token_ids", 1), ("logprobs", 1), ("ranks", 1), ("top_token_ids", width)):
                del getattr(part, name)[: known * count]
            del part.top_logprobs[: known * width]
            part.first_prompt_index += known
        self._prompt_count = max(self._prompt_count, part.first_prompt_index + len(part.token_ids))
        return bool(part.token_ids)

    def keep(self, started: coordinator_pb.Started, seed: int) -> None:
        """The text has started, or its request has: it keeps that model, rule and this seed from now on."""
        self.may_resume, self._model_digest = True, started.model_digest
        if started.rule == types_pb.RULE_COUPLED:
            self.request.sampling.seed = seed
        elif started.rule == types_pb.RULE_REJECTION:
            self.request.speculative.rule = started.rule


class Choices:
    """What came of the choices of one request, each as a `Continuation`. `request` is for the first stream, which all
    share; `texts` go on one by one."""

    def __init__(self, request: Request, sums_statistics: bool) -> None:
        """As for `Continuation`."""
        self.texts = [Continuation(request, sums_statistics, choice) for choice in range(request.sampling.n)]
        self.request = Request()
        self.request.CopyFrom(self.texts[0].request)
        for text in self.texts:
            text.request.sampling.ClearField("n")

    @property
    def is_over(self) -> bool:
        """Whether all have ended."""
        return all(text.is_over for text in self.texts)

    @property
    def may_resume(self) -> bool:
        """Whether the request has started."""
        return self.started is not None

    @property
    def started(self) -> coordinator_pb.Started | None:
        """The start of the first choice."""
        return self.texts[0].started

    def take(self, response: coordinator_pb.GenerateResponse) -> bool:
        """Adds a message to its text; as `Continuation.take`. Raises Mismatch for a choice that was not asked for."""
        if response.choice >= len(self.texts):
            raise Mismatch(f"the coordinator sent choice {response.choice} of {len(self.texts)}")
        return self.texts[response.choice].take(response)

    def unfinished(self) -> list[Continuation]:
        """Returns the texts that have not ended, to go on one by one once the request has started."""
        first = self.started
        assert first is not None
        for text in self.texts:
            if not text.may_resume:  # the stream was lost between the starts of two choices
                text.keep(first, (first.seed + text.choice) & UINT64_MAX)
        return [text for text in self.texts if not text.is_over]


def so_far(request: Request, sums_statistics: bool) -> Continuation | Choices:
    """Returns what came of a request that is about to be sent: nothing yet; arguments as for `Continuation`."""
    return (Choices if 1 < request.sampling.n <= N_MAX else Continuation)(request, sums_statistics)
