"""A pair as it is served: the times of its steps and rounds, and what a plan then really gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from specdec.advise.forecast import Estimate, Times, line_through, resampled, share
from specdec.advise.measuring import Text
from specdec.cli.demo import Run, fill
from specdec.cli.request import UINT64_MAX, GenerateSettings, build_request
from specdec.config import ServeSettings
from specdec.policy.steps import StepCurve
from specdec.settings import TlsSettings

WAIT_MS = 1000
PROBED = (0, 1, 2, 4, 8)  # draft tokens of the rounds that are timed
PROBED_TEXTS, PROBED_TOKENS = 3, 48
SEED_OFFSET = 0x5EED  # of a served text: with the seed of the predicted one it would be that text again, token by token


@dataclass(frozen=True, slots=True)
class Served:
    """A running pair: the coordinator's address, and T by rows and by nodes, as its services measured them."""

    address: str
    target_steps: StepCurve
    draft_steps: StepCurve

    def times(
        self, rounds_s: Sequence[tuple[float, float]], given_s: tuple[float, float], rtt_s: float, rest_s: float
    ) -> Times:
        """Returns times for forecasts. `rounds_s`: (draft tokens, seconds of a round), measured here; `given_s`: steps
        of target and draft elsewhere, 0: here; a given one scales the measured curve. `rest_s`, above 0, replaces the
        rest of a round."""

        def curve(steps: StepCurve, given_s: float) -> Callable[[float], float]:
            scale = given_s / (steps.seconds(1) or given_s) if given_s else 1.0
            return lambda rows: (steps.seconds(rows) or 0.0) * scale

        target, draft = curve(self.target_steps, 0.0), curve(self.draft_steps, 0.0)
        rests = [(length, rest_s or own_s - target(length + 1) - length * draft(1)) for length, own_s in rounds_s]
        target, draft = curve(self.target_steps, given_s[0]), curve(self.draft_steps, given_s[1])
        return Times(target, draft, rtt_s, line_through(rests))


@contextmanager
def served(target: str, draft: str, device: str = "cpu") -> Iterator[Served]:
    """Yields the pair, served by this machine on a device, with one thread a model. Raises SpecdecError."""
    from specdec.cli import serve

    settings = ServeSettings(
        model=target,
        draft_model=draft,
        device=device,
        proposers="draft",
        port=0,
        threads=1,
        log_level="error",
        drain_grace_s=1.0,
    )
    with serve.running(settings, []) as (coordinator, target_child, draft_child, _):
        addresses = target_child.address, None if draft_child is None else draft_child.address
        found = asyncio.run(serve.check_match(settings, *addresses))
        curves = StepCurve(), StepCurve()
        for curve, name in zip(curves, ("target", "draft")):
            curve.prime(found[name].step_times)
        yield Served(coordinator.address, *curves)


@dataclass(slots=True)
class Observed:
    """Sums over generations with a plan, and over those without: by text, for intervals."""

    accepted: list[list[float]] = field(default_factory=list)  # [accepted draft tokens, rounds that had any]
    verified: list[list[float]] = field(default_factory=list)  # [accepted draft tokens, verified ones]
    tokens: list[list[float]] = field(default_factory=list)  # [tokens, seconds] after the first message
    plain_tokens: list[list[float]] = field(default_factory=list)

    @property
    def mean_length(self) -> Estimate:
        """Tokens of a speculating round."""
        return resampled(self.accepted, lambda sums: 1 + share(sums))

    @property
    def acceptance(self) -> Estimate:
        """Accepted / verified draft tokens, those after a rejected one among them."""
        return resampled(self.verified, share)

    @property
    def rate(self) -> Estimate:
        """Tokens per second with the plan."""
        return resampled(self.tokens, share)

    @property
    def plain_rate(self) -> Estimate:
        """Tokens per second without."""
        return resampled(self.plain_tokens, share)


async def observe(address: str, texts: Sequence[Text], length: int, token_count: int) -> Observed:
    """Generates new answers to the texts' prompts, each with rounds of `length` draft tokens and, right after, without.
    Raises SpecdecError."""
    observed = Observed()
    async with connected(address) as channel:
        for text in texts:
            run = await _generate(channel, text, length, token_count)
            if (statistics := run.statistics) and statistics.num_spec_steps:
                accepted = float(statistics.num_accepted_draft_tokens)
                observed.accepted.append([accepted, float(statistics.num_spec_steps)])
                observed.verified.append([accepted, float(statistics.num_draft_tokens)])
            plain = await _generate(channel, text, 0, token_count)
            for sums, own in ((observed.tokens, run), (observed.plain_tokens, plain)):
                if (count := len(own.token_ids) - own.first_count) > 0:
                    sums.append([float(count), own.last_s - own.first_s])
    return observed


async def probe(address: str, texts: Sequence[Text]) -> list[tuple[float, float]]:
    """Returns (draft tokens, mean seconds of a round), measured in turns on some texts. Raises SpecdecError."""
    sums = {length: [0.0, 0.0] for length in PROBED}
    async with connected(address) as channel:
        for text in texts[:: max(1, len(texts) // PROBED_TEXTS)][:PROBED_TEXTS]:
            for length, own in sums.items():
                run = await _generate(channel, text, length, PROBED_TOKENS, ignore_eos=True)
                if run.statistics and run.statistics.rounds > 1:
                    own[0] += run.last_s - run.first_s
                    own[1] += run.statistics.rounds - 1
    return [(float(length), share(own)) for length, own in sums.items() if own[1]]


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Any]:
    """Yields a channel to a coordinator."""
    from specdec.rpc.client import open_channel

    channel = open_channel(address, TlsSettings())
    try:
        yield channel
    finally:
        await channel.close()


async def _generate(channel: Any, text: Text, length: int, token_count: int, ignore_eos: bool | None = None) -> Run:
    run = Run()
    await fill(run, channel, build_request(asked_of(text, length, token_count, ignore_eos), None))
    return run


def asked_of(text: Text, length: int, token_count: int, ignore_eos: bool | None = None) -> GenerateSettings:
    """Returns what is asked to answer a text's prompt anew, with rounds of `length` draft tokens; 0: without. A sampled
    answer has a seed of its own, the same for every `length`; at temperature 0 it is the text again."""
    params = text.params
    plan: dict[str, Any] = {"policy": "off"}
    if length:
        plan = {"policy": "fixed", "num_speculative_tokens": length, "draft_window": length, "draft_nodes_per_step": 1}
        plan["draft_wait_ms"] = WAIT_MS  # until all are there
    return GenerateSettings(
        prompt_ids=text.prompt_ids,
        max_tokens=token_count,
        temperature=params.temperature,
        seed=(params.seed + SEED_OFFSET) & UINT64_MAX if params.temperature else None,
        ignore_eos=ignore_eos,
        **plan,
    )
