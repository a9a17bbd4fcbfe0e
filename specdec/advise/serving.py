"""A pair, or a target with its head, as it is served: the times of its steps and rounds, and what a plan then really
gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from specdec.advise.forecast import Estimate, Times, line_through, resampled, resampled_part, share
from specdec.advise.measuring import Text, by_prompt, tracked
from specdec.client.request import Request, make_request
from specdec.client.run import Run
from specdec.client.stream import Client
from specdec.config import ServeSettings
from specdec.protocol.types import Rule
from specdec.step_curve import StepCurve

NONE = "none"  # a draft or heads that are not served
WAIT_MS = 1000
PROBED = (0, 1, 2, 4, 8)  # draft tokens of the rounds that are timed
PROBED_TEXTS, PROBED_TOKENS = 3, 48
SEED_COUNT = 1 << 64
SEED_OFFSET = 0x5EED  # of a served text: with the seed of the predicted one it would be that text again, token by token


@dataclass(frozen=True, slots=True)
class Served:
    """A running pair: the coordinator's address, and T by rows and by nodes, as its services measured them. `is_head`:
    a head on the target, of whose passes the target has told T."""

    address: str
    target_steps: StepCurve
    draft_steps: StepCurve
    is_head: bool = False

    def times(
        self, rounds_s: Sequence[tuple[float, float]], given_s: tuple[float, float], rtt_s: float, rest_s: float
    ) -> Times:
        """Returns times for forecasts. `rounds_s`: (draft tokens, seconds of a round), measured here; `given_s`: steps
        of target and draft elsewhere, 0: here; a given one scales the measured curve, the target's its head's too.
        `rest_s`, above 0, replaces the rest of a round."""

        def curve(steps: StepCurve, given_s: float) -> Callable[[float], float]:
            scale = given_s / (steps.seconds(1) or given_s) if given_s else 1.0
            return lambda rows: (steps.seconds(rows) or 0.0) * scale

        target, draft = curve(self.target_steps, 0.0), curve(self.draft_steps, 0.0)
        rests = [(length, rest_s or own_s - target(length + 1) - length * draft(1)) for length, own_s in rounds_s]
        if self.is_head:
            given_s = given_s[0], given_s[0] * draft(1) / (target(1) or 1.0)
        target, draft = curve(self.target_steps, given_s[0]), curve(self.draft_steps, given_s[1])
        return Times(target, draft, None if self.is_head else rtt_s, line_through(rests))


@contextmanager
def served(target: str, draft: str, device: str = "cpu", threads: int = 1, heads: str = NONE) -> Iterator[Served]:
    """Yields the pair, or with `heads` and a draft NONE the target with its head, served by this machine on a device,
    with `threads` CPU threads a model. Raises SpecdecError."""
    from specdec.launch.serving import running

    is_head = heads != NONE
    settings = ServeSettings(
        model=target,
        draft_model=draft,
        heads=heads,
        device=device,
        proposers="heads" if is_head else "draft",
        port=0,
        threads=threads,
        log_level="error",
        drain_grace_s=1.0,
    )
    with running(settings) as serving:
        told, curves = serving.descriptions, (StepCurve(), StepCurve())
        passes = told["target"].head_pass_times
        for curve, times in zip(curves, (told["target"].step_times, passes if is_head else told["draft"].step_times)):
            curve.prime(times)
        yield Served(serving.address, *curves, is_head)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One served generation that answers a text's prompt anew, under `rule` or, if it is None, without drafts.
    `rounds`: those that had draft tokens; `drafted`: all that were verified, those after a rejected one among them;
    `tokens` after the first message, in `seconds`."""

    text: Text
    rule: Rule | None
    accepted: float
    drafted: float
    rounds: float
    tokens: float
    seconds: float

    @classmethod
    def of(cls, text: Text, rule: Rule | None, run: Run) -> Outcome:
        """Returns what a run, which has ended, gave."""
        told = run.statistics
        accepted, drafted, rounds = told.num_accepted_draft_tokens, told.num_draft_tokens, told.num_spec_steps
        return cls(text, rule, accepted, drafted, rounds, run.timed_tokens, run.seconds)


def acceptance_of(outcomes: Sequence[Outcome]) -> Estimate:
    """Accepted / verified draft tokens."""
    return resampled_part(by_prompt([own.text for own in outcomes], [(own.accepted, own.drafted) for own in outcomes]))


def mean_length_of(outcomes: Sequence[Outcome]) -> Estimate:
    """Tokens of a speculating round."""
    return estimated(outcomes, lambda own: (own.accepted + own.rounds, own.rounds))


def rate_of(outcomes: Sequence[Outcome]) -> Estimate:
    """Tokens per second of one stream."""
    return estimated(outcomes, lambda own: (own.tokens, own.seconds))


def estimated(outcomes: Sequence[Outcome], of: Callable[[Outcome], tuple[float, float]]) -> Estimate:
    """A sum over another, with its interval over prompts."""
    return resampled(by_prompt([own.text for own in outcomes], map(of, outcomes)), share)


async def observe(
    address: str, texts: Sequence[Text], length: int, token_count: int, console: Console
) -> list[Outcome]:
    """Generates new answers to the texts' prompts: each with rounds of `length` draft tokens and, right after, without;
    sampled ones, which are drawn under COUPLED, then under REJECTION too. Raises SpecdecError."""
    outcomes = []
    asked = [
        (text, rule)
        for text in texts
        for rule in (text.params.rule, None, *([Rule.REJECTION] if text.params.rule is Rule.COUPLED else []))
    ]
    async with Client(address, resume_s=0.0) as client:
        for text, rule in tracked(asked, "the plan is served", console):
            run = await client.read(asked_of(text, length if rule else 0, token_count, rule=rule))
            outcomes.append(Outcome.of(text, rule, run))
    return outcomes


def probed(texts: Sequence[Text]) -> list[Text]:
    """Returns the texts on whose prompts rounds are timed: equally many of each temperature, since a drawn token takes
    other work than the likeliest, and of prompts that lie apart; at least PROBED_TEXTS, where there are."""
    groups: dict[float, list[Text]] = defaultdict(list)
    for text in texts:
        groups[text.params.temperature].append(text)
    count = -(-PROBED_TEXTS // len(groups)) * len(groups)
    places = [
        sorted({at * len(own) // count for at in range(start, count, len(groups))})
        for start, own in enumerate(groups.values())
    ]
    return [own[place] for own, its in zip(groups.values(), places) for place in its]


async def probe(address: str, texts: Sequence[Text], token_count: int, console: Console) -> list[tuple[float, float]]:
    """Returns (draft tokens, mean seconds of a round), measured in turns on the texts of `probed`. `token_count`: that
    the texts had at most, so that as many fit behind their prompts. Raises SpecdecError."""
    token_count = min(PROBED_TOKENS, token_count)
    sums = {length: [0.0, 0.0] for length in PROBED}
    async with Client(address, resume_s=0.0) as client:
        asked = [(text, length) for text in probed(texts) for length in PROBED]
        for text, length in tracked(asked, "rounds are timed", console):
            run = await client.read(asked_of(text, length, token_count, ignore_eos=True))
            if run.statistics.rounds > 1:
                sums[length][0] += run.seconds
                sums[length][1] += run.statistics.rounds - 1
    return [(float(length), share(own)) for length, own in sums.items() if own[1]]


def asked_of(
    text: Text, length: int, token_count: int, ignore_eos: bool | None = None, rule: Rule | None = None
) -> Request:
    """Returns what is asked to answer a text's prompt anew, with rounds of `length` draft tokens; 0: without. A sampled
    answer has a seed of its own, the same for every `length`, and under REJECTION, which honours none, none; at
    temperature 0 it is the text again."""
    params = text.params
    is_seeded = params.temperature > 0 and rule is not Rule.REJECTION
    plan: dict[str, Any] = {"policy": "off"}
    if length:
        plan = {"policy": "fixed", "num_speculative_tokens": length, "draft_window": length, "draft_nodes_per_step": 1}
        plan["draft_wait_ms"] = WAIT_MS  # until all are there
    length = params.encoder_length
    return make_request(
        text.prompt_ids[:length] if length else text.prompt_ids,
        decoder_prompt=text.prompt_ids[length:] if length else (),
        max_tokens=token_count,
        temperature=params.temperature,
        seed=(params.seed + SEED_OFFSET) % SEED_COUNT if is_seeded else None,
        rule="rejection" if rule is Rule.REJECTION else None,
        ignore_eos=ignore_eos,
        **plan,
    )
