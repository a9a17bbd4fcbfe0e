"""A pair as it is served: the step times its services measure at start, and what a plan then really gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from specdec.advise.forecast import Estimate, Times, resampled, share
from specdec.advise.measuring import Text
from specdec.cli.demo import Run, fill
from specdec.cli.request import GenerateSettings, build_request
from specdec.config import ServeSettings
from specdec.policy.steps import StepCurve
from specdec.settings import TlsSettings

WAIT_MS = 1000


@dataclass(frozen=True, slots=True)
class Served:
    """A running pair: the coordinator's address, and T by rows and by nodes, as its services measured them."""

    address: str
    target_steps: StepCurve
    draft_steps: StepCurve

    def times(self, target_s: float, draft_s: float, rtt_s: float, other_s: float) -> Times:
        """Returns times for forecasts; a given step, above 0, scales the measured curve to it."""

        def curve(steps: StepCurve, given_s: float) -> Callable[[float], float]:
            scale = given_s / (steps.seconds(1) or given_s) if given_s else 1.0
            return lambda rows: (steps.seconds(rows) or 0.0) * scale

        return Times(curve(self.target_steps, target_s), curve(self.draft_steps, draft_s), rtt_s, other_s)


@contextmanager
def served(target: str, draft: str) -> Iterator[Served]:
    """Yields the pair, served by this machine with one thread a model. Raises SpecdecError."""
    from specdec.cli import serve

    settings = ServeSettings(model=target, draft_model=draft, port=0, threads=1, log_level="error", drain_grace_s=1.0)
    with serve.running(settings, []) as (coordinator, target_child, draft_child, _):
        found = asyncio.run(serve.check_match(settings, target_child.address, draft_child.address))
        curves = StepCurve(), StepCurve()
        for curve, name in zip(curves, ("target", "draft")):
            curve.prime(found[name].step_times)
        yield Served(coordinator.address, *curves)


@dataclass(slots=True)
class Observed:
    """Sums over generations with a plan, and over those without: by text, for intervals."""

    accepted: list[list[float]] = field(default_factory=list)  # [accepted draft tokens, rounds that had any]
    tokens: list[list[float]] = field(default_factory=list)  # [tokens, seconds] after the first message
    plain_tokens: list[list[float]] = field(default_factory=list)

    @property
    def mean_length(self) -> Estimate:
        """Tokens of a speculating round."""
        return resampled(self.accepted, lambda sums: 1 + share(sums))

    @property
    def rate(self) -> Estimate:
        """Tokens per second with the plan."""
        return resampled(self.tokens, share)

    @property
    def plain_rate(self) -> Estimate:
        """Tokens per second without."""
        return resampled(self.plain_tokens, share)


async def observe(address: str, texts: Sequence[Text], length: int, token_count: int) -> Observed:
    """Generates the texts again, each with rounds of `length` draft tokens and, right after, without. Raises
    SpecdecError."""
    from specdec.rpc.client import open_channel

    observed = Observed()
    channel = open_channel(address, TlsSettings())
    try:
        for text in texts:
            for is_plain in (False, True):
                await _generate(channel, text, 0 if is_plain else length, token_count, observed)
    finally:
        await channel.close()
    return observed


async def _generate(channel: Any, text: Text, length: int, token_count: int, observed: Observed) -> None:
    params = text.params
    plan: dict[str, Any] = {"policy": "off"}
    if length:
        plan = {"policy": "fixed", "num_speculative_tokens": length, "draft_window": length, "draft_nodes_per_step": 1}
        plan["draft_wait_ms"] = WAIT_MS  # until all are there
    asked = GenerateSettings(
        prompt_ids=text.prompt_ids,
        max_tokens=token_count,
        temperature=params.temperature,
        seed=params.seed if params.temperature else None,
        **plan,
    )
    run = Run()
    await fill(run, channel, build_request(asked, None))
    statistics = run.statistics
    if length and statistics and statistics.num_spec_steps:
        observed.accepted.append([float(statistics.num_accepted_draft_tokens), float(statistics.num_spec_steps)])
    if (count := len(run.token_ids) - run.first_count) > 0:
        sums = observed.tokens if length else observed.plain_tokens
        sums.append([float(count), run.last_s - run.first_s])
