"""Measures of a class, prices, accepted tokens of a second of drafting, and the tables, against cases by hand."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from specdec.advise.agreement import Agreement
from specdec.advise.command import advise, check_table, names_of
from specdec.advise.forecast import Break, Estimate, Times
from specdec.advise.measuring import EVERYTHING, Reading, Text
from specdec.advise.report import Advice, ChainForecast, advice_of, cells_of, plans_of, price_of, rounds_forecast
from specdec.advise.settings import AdviseSettings
from specdec.advise.view import (
    RTTS_MS,
    acceptance_table,
    length_table,
    picture_of,
    place_table,
    sentence,
    show,
    sweep_table,
    trip_table,
)
from specdec.errors import ConfigError
from specdec.protocol.types import ResolvedSamplingParams, Rule

# A step of the target takes 40 ms, of the draft 5 ms, a round trip 3 ms, the rest 2 ms.
TIMES = Times(lambda rows: 0.040, lambda nodes: 0.005 * nodes, 0.003, lambda length: 0.002)


def reading_of(coins: list[float]) -> Reading:
    """A greedy text whose draft tokens pass with these probabilities; of other measures all are 0."""
    params = ResolvedSamplingParams(rule=Rule.GREEDY, seed=0, prompt_length=1, temperature=0.0)
    passes, none = {Rule.GREEDY: torch.tensor(coins, dtype=torch.float64)}, torch.zeros(len(coins), dtype=torch.float64)
    agreement = Agreement(passes, passes, none, none, none, none, none, none, none)
    return Reading(Text(EVERYTHING, params, tuple(range(len(coins) + 1)), 0), agreement)


# The first token comes with the prompt. After it, with one draft token a round: one passes and the target's own token
# follows (2 tokens), then one is rejected (1 token): 12 tokens in 8 rounds.
READINGS = [reading_of([1, *[1, 0, 0] * 4])]


def measured_text(prompt_class: str, coin: float, measure: float) -> Reading:
    """A text of 13 positions: each passes with `coin`, and every other measure is `measure`."""
    reading = reading_of([coin] * 13)
    every = torch.full((13,), measure, dtype=torch.float64)
    own: dict[str, Any] = {name: every for name in Agreement.__slots__[2:-1]} | {
        "is_likeliest": torch.zeros_like(every)
    }
    return replace(
        reading,
        text=replace(reading.text, prompt_class=prompt_class),
        agreement=replace(reading.agreement, **own),
    )


def test_every_measure_of_a_class_has_its_interval() -> None:
    """Claim: a class has the mean of each measure, and of rounds the tokens with 1 to 8 draft tokens; where its texts
    agree the interval has no width, where they differ it holds the mean. By hand: of two texts that always pass and
    never pass, one draft token a round gives 2 and 1 tokens; together 24 tokens in 6 + 12 rounds. A confidence that
    never comes true is all calibration error: of the mean, in whatever bins. Of equal disagreement the worst 3 of 26
    positions have 3 / 26; of 52, half with 0.5 and half with 0.25, the worst 6 have 3 of 19.5; with one text of four
    that has more, 3 of 16.25. Without a cosine there is none."""
    never, always = measured_text("never", 0.0, 0.5), measured_text("always", 1.0, 0.25)
    cells = {cell.prompt_class: cell for cell in cells_of([never, never, always, always])}
    assert list(cells) == ["never", "always", "every class"]
    point = Estimate(0.5, 0.5, 0.5)
    own = cells["never"]
    assert (
        own.variation == own.divergence == own.entropy == own.reachable == own.calibration_error == own.cosine == point
    )
    assert own.variation_in_tenth == Estimate(3 / 26, 3 / 26, 3 / 26)
    assert own.tokens == {"GREEDY": [Estimate(1.0, 1.0, 1.0)] * 8}
    assert [tokens.value for tokens in cells["always"].tokens["GREEDY"]] == pytest.approx([2, 3, 4, 4, 6, 6, 6, 6])
    for value in (cells["every class"].variation, cells["every class"].calibration_error):
        assert value.value == pytest.approx(0.375) and value.low == 0.25 and value.high == 0.5
    tenth = cells["every class"].variation_in_tenth
    assert (tenth.value, tenth.low, tenth.high) == pytest.approx((3 / 19.5, 3 / 26, 3 / 16.25))
    tokens = cells["every class"].tokens["GREEDY"][0]
    assert tokens.value == pytest.approx(24 / 18) and (tokens.low, tokens.high) == (1.0, 2.0)
    assert cells_of([replace(never, agreement=reading_of([1.0]).agreement)])[0].cosine == Estimate(0.0, 0.0, 0.0)
    nan = torch.full((13,), torch.nan, dtype=torch.float64)
    assert cells_of([replace(never, agreement=replace(never.agreement, cosine=nan))])[0].cosine is None


def test_rounds_are_told_under_every_rule() -> None:
    """Claim: a cell has the tokens of a round by the coins of each of its rules, REJECTION's beside those of the rule
    that reproduces the text. By hand: coins that always pass, and never."""
    reading = measured_text("code", 1.0, 0.5)
    never = torch.zeros(13, dtype=torch.float64)
    own = reading.agreement
    both = replace(own, passes=own.passes | {Rule.REJECTION: never}, accepted=own.accepted | {Rule.REJECTION: never})
    (cell,) = cells_of([replace(reading, agreement=both)])
    assert [cell.tokens[rule][0].value for rule in ("GREEDY", "REJECTION")] == pytest.approx([2, 1])
    forecasts = [rounds_forecast([replace(reading, agreement=both)], 1, rule) for rule in (None, Rule.REJECTION)]
    assert [acceptance.value for acceptance, _ in forecasts] == pytest.approx([1, 0])
    assert [tokens.value for _, tokens in forecasts] == pytest.approx([2, 1])


def test_texts_of_a_prompt_are_one_sample() -> None:
    """Claim: texts of one prompt at several temperatures count together in the interval of a plan. By hand: of two
    prompts, one whose texts always pass and one whose never do, the interval is that of two samples, whether each has
    one text or four; eight prompts with a text each have a narrower one. Draft tokens: 6 that pass and 11 that do
    not."""

    def interval(prompts: int, texts: int) -> Estimate:
        made = [measured_text(EVERYTHING, float(prompt % 2), 0.0) for prompt in range(prompts) for _ in range(texts)]
        own = [
            replace(one, text=replace(one.text, token_ids=(100 + index // texts, *one.text.token_ids[1:])))
            for index, one in enumerate(made)
        ]
        return rounds_forecast(own, 1)[0]

    assert interval(2, 4) == interval(2, 1) and interval(2, 1).value == pytest.approx(6 / 17)
    assert interval(8, 1).high < interval(2, 4).high == pytest.approx(1)


def test_the_table_of_checks_has_every_rule_on_80_columns() -> None:
    """Claim: predicted beside served stand the plan's values and then those of each rule, with the draft tokens that
    were verified under it, and no number is cut."""
    rounds = {"acceptance": (Estimate(0.5, 0.4, 0.6), Estimate(0.48, 0.38, 0.58))}
    rounds["tokens a round"] = rounds["acceptance"]
    plan = {"tokens/s": rounds["acceptance"], "plain": (20.0, Estimate(19.0, 18.0, 20.0))}
    rules = {name: {"draft_tokens": 4000, "values": rounds} for name in ("GREEDY", "REJECTION", "COUPLED")}
    check = {"draft": "smollm2-draft", "length": 2, "draft_tokens": 8000, "values": rounds | plan, "rules": rules}
    console = Console(width=80)
    with console.capture() as shown:
        console.print(check_table(check))
    lines = [line.replace("│", " ").split() for line in shown.get().splitlines()]
    assert "smollm2-draft, k = 2" in shown.get() and "…" not in shown.get()
    assert ["8000", "acceptance", "0.500", "0.480", "±0.100", "0.96"] in lines
    assert ["plain", "20.000", "19.000", "±1.000", "0.95"] in lines
    for name in rules:
        assert [name, "4000", "acceptance", "0.500", "0.480", "±0.100", "0.96"] in lines


def test_the_table_of_classes_is_whole_on_80_columns() -> None:
    """Claim: values and half their intervals stand in two lines a class and temperature, with two rules, and no number
    is cut: "every class" fits, and a longer name takes more lines."""
    cells = cells_of([measured_text("a longer name of prompts", 0.0, 0.5), measured_text("code", 1.0, 0.25)])
    cells = [
        replace(
            cell,
            acceptance={"COUPLED": Estimate(0.5, 0.4, 0.6)} | {"REJECTION": Estimate(0.6, 0.5, 0.7)},
            tokens=dict.fromkeys(("COUPLED", "REJECTION"), cell.tokens["GREEDY"]),
            divergence=Estimate(13.0, 11.96, 14.04),
        )
        for cell in cells
    ]
    console = Console(width=80)
    with console.capture() as shown:
        console.print(acceptance_table(cells))
        console.print(length_table(cells))
    lines = [line.split() for line in shown.get().splitlines() if line.strip()]
    assert "…" not in shown.get() and ["name", "of"] in lines
    assert ["every", "class", "0", "COUPLED", "0.50", "±.10", "0.38", "15%", "13.00", "0.38", "0.38", "0.38"] in lines
    assert ["REJECTION", "0.60", "±.10", "±.12", "±2%", "±1.04", "±.12", "±.12", "±.12"] in lines
    assert ["every", "class", "0", "1.33", "1.50", "1.60", "1.60"] in [line[:7] for line in lines]
    assert ["REJECTION", "1.33", "1.50", "1.60", "1.60"] in [line[:5] for line in lines]


def test_the_price_of_a_million_tokens() -> None:
    """Claim: at 100 tokens/s a million tokens take 10,000 s, 2.78 hours: 10 at a price of 3.60 an hour; half the rate
    costs twice as much, and without a price it is 0."""
    assert price_of(3.6, 100.0) == pytest.approx(10.0)
    assert price_of(3.6, 50.0) == pytest.approx(20.0) and price_of(0.0, 100.0) == 0


def test_accepted_tokens_of_a_second_of_drafting() -> None:
    """Claim: only steps that are made count. 12 tokens in 8 rounds are 1.5 a round, 4 of them of the draft; the last
    round, of one token, drafts none: 7 steps of 5 ms give 114 accepted tokens per second of the draft's computation,
    with two steps a round, of which the second is always rejected, 57. All passing, 3 draft tokens give 12 tokens in 3
    rounds, 9 accepted in 9 steps: 200. A text of 3 tokens leaves a round of 3 steps for 2: 200 again, not 133. The
    target's time and the round trip are not in it."""
    one, two = plans_of(READINGS, TIMES, (0.0, 0.0))[:2]
    assert (one.length, two.length) == (1, 2)
    assert one.tokens.value == two.tokens.value == pytest.approx(1.5)
    assert one.accepted_per_draft_s == pytest.approx(4 / 0.035) and two.accepted_per_draft_s == pytest.approx(4 / 0.070)
    three = plans_of([reading_of([1.0] * 13)], TIMES, (0.0, 0.0))[2]
    assert three.tokens.value == pytest.approx(4) and three.accepted_per_draft_s == pytest.approx(200)
    short = plans_of([reading_of([1.0] * 4)], TIMES, (0.0, 0.0))[2]
    assert short.tokens.value == pytest.approx(3) and short.accepted_per_draft_s == pytest.approx(200)


def test_prices_of_a_plan_and_of_plain_decoding() -> None:
    """Claim: a plan is paid for both machines, plain decoding for the target's alone. By hand: a round with one draft
    token takes 40 + 5 + 3 + 2 = 50 ms and has 1.5 tokens, 30 tokens/s, a plain one 42 ms; at 2.70 and 0.54 an hour a
    million tokens cost 30 and 31.50."""
    advice = advice_of("draft", 1, READINGS, TIMES, (2.7, 0.54))
    assert advice.plans[0].rate.value == pytest.approx(30)
    assert advice.plans[0].price == pytest.approx(3.24 / 3600 / 30 * 1e6) == pytest.approx(30)
    assert advice.plain_price == pytest.approx(31.5)
    assert advice.best == 1 and advice.best_plan == advice.plans[0]


def advice_with(draft: str, rate: float, length: int) -> Advice:
    """An advice with one plan of this rate; plain decoding has 20 tokens/s. `length` 0: plain is better."""
    plan = ChainForecast(
        length or 1, Estimate(1.5, 1.4, 1.6), Estimate(0.5, 0.5, 0.5), *[Estimate(rate, rate, rate)] * 2, 0.0, 0.0
    )
    return Advice(draft, 7_000_000, 0.04, 0.005, 20.0, 0.0, length, [], [plan], Break(0.0, 0.0, 0))


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (
            Break(0.0012, 0.0005, 0),
            "Drafting would pay with a round trip below 1.20 ms, or with a draft step below 0.50 ms. It does not pay ",
        ),
        (
            Break(-0.001, 0.0005, 0),
            "Drafting would pay with a draft step below 0.50 ms. It does not pay at any round trip, or ",
        ),
        (Break(-0.001, -0.002, 0), "It does not pay at any round trip, or at any draft step, or "),
    ],
)
def test_a_draft_that_does_not_pay_is_told_its_limits(ends: Break, told: str) -> None:
    """Claim: where plain decoding is faster, the sentence has the round trip and the draft step below which drafting
    would pay, says which of them it cannot reach, and that one session does not pay: no limit is left out."""
    text = sentence(replace(advice_with("draft", 19.0, 0), pays_until=ends), 0.005)
    begins = "Plain decoding is faster than any number of draft tokens at a round trip of 5 ms. "
    assert text == f"{begins}{told}with one session."


def test_a_head_has_no_round_trip() -> None:
    """Claim: a head's round takes no round trip, its advice names a pass in place of a draft step and no trip, it is
    paid for the target's machine alone, and beside a draft its rate is the same at every round trip. By hand: without
    the 3 ms of the trip a round of one draft token takes 47 ms and has 1.5 tokens."""
    head = advice_of("head", 1, READINGS, replace(TIMES, rtt=None), (2.7, 0.0))
    draft = advice_of("draft", 1, READINGS, TIMES, (2.7, 0.54))
    assert head.is_head and not draft.is_head and head.pays_until.rtt_s is None
    assert head.plans[0].rate.value == pytest.approx(1.5 / 0.047)
    assert head.plans[0].price == pytest.approx(2.7 / 3600 * 0.047 / 1.5 * 1e6)
    assert head.pays_until.draft_step_s == pytest.approx(draft.pays_until.draft_step_s + 0.003)
    assert "Drafting pays up to a pass of 21.0 ms, a batch of" in sentence(head, 0.005)
    assert "up to a round trip of 16 ms, a draft step of 18.0 ms, a batch of" in sentence(draft, 0.005)
    poor = replace(head, best=0, pays_until=Break(None, 0.0005, 0))
    begins = "Plain decoding is faster than any number of draft tokens. Drafting would pay with a pass below 0.50 ms. "
    assert sentence(poor, 0.005) == f"{begins}It does not pay with one session."
    console = Console(width=80)
    with console.capture() as shown:
        console.print(trip_table([draft, head], [TIMES, replace(TIMES, rtt=None)]))
    lines = [line.split() for line in shown.get().splitlines()]
    trips = [f"{1.5 / (0.047 + rtt_ms / 1e3):.1f}" for rtt_ms in RTTS_MS]
    assert ["draft", *trips] in lines and ["head", *[trips[0]] * len(RTTS_MS)] in lines


def test_a_head_shows_its_acceptance_by_place() -> None:
    """Claim: behind the acceptance of its first token a head has that of each later one, those before it accepted, with
    a chain behind every token, and its rounds are those of these coins. By hand: of four positions the coins are 1, 1,
    0, 1 at the first place and, from the second position on, 0, 1, 1 at the second. Three of four pass; behind those of
    the three that do not end the text, one of two. Of rounds with two draft tokens the first accepts one and writes
    two, the next none, and the last drafts none: 3 rounds; by the coins of the first place alone they are 2. A draft
    has no such table."""
    reading = reading_of([1.0, 1.0, 0.0, 1.0])
    text = replace(reading.text, token_ids=tuple(range(6)))  # whose first answered token a head does not draft
    deeper = {Rule.GREEDY: torch.tensor([[0.0, 0.0, 1.0, 1.0]], dtype=torch.float64)}
    own = replace(reading, text=text, agreement=replace(reading.agreement, deeper=deeper))
    (cell,), (plain,) = cells_of([own]), cells_of([replace(reading, text=text)])
    assert [one.value for one in cell.places["GREEDY"][:2]] == pytest.approx([3 / 4, 1 / 2]) and plain.places == {}
    assert cell.tokens["GREEDY"][1].value == pytest.approx(4 / 3)
    assert plain.tokens["GREEDY"][1].value == pytest.approx(4 / 2)
    advice = replace(advice_of("head", 1, [own], replace(TIMES, rtt=None), (0.0, 0.0)))
    console = Console(width=80)
    with console.capture() as shown:
        console.print(place_table([cell]))
        show(console, advice, 0.0)
    assert ["all", "0", "0.75", "0.50"] in [line.split()[:4] for line in shown.get().splitlines()]
    assert "…" not in shown.get() and "a pass of the head 5.00 ms, a step of the target 40.00 ms" in shown.get()
    assert shown.get().count("acceptance of a chain's token j, those before it accepted") == 2


def test_the_table_of_all_drafts_shows_the_best_wherever_it_stands() -> None:
    """Claim: a draft a line in the order given, with the values of its own plan; the fastest is bold, here the one in
    the middle, and no other; a draft that does not pay has 0 draft tokens and counts as plain decoding, though its plan
    is there. Conclusive: another place of the fastest moves the bold line."""
    small, middle, large = advice_with("small", 24.0, 1), advice_with("middle", 36.0, 3), advice_with("large", 19.0, 0)
    table = sweep_table([small, middle, large])
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["draft"] == ["small", "middle", "large"]
    assert columns["k"] == ["1", "3", "0"] and columns["MB"] == ["7"] * 3 and columns["step ms"] == ["5.00"] * 3
    assert columns["tokens/s"] == ["24.0 ±0.0", "36.0 ±0.0", ""] and columns["tokens a round"][2] == "1"
    assert [row.style for row in table.rows] == ["", "bold", ""]
    assert [row.style for row in sweep_table([middle, large, small]).rows] == ["bold", "", ""]
    assert [row.style for row in sweep_table([advice_with("poor", 19.0, 0), large, small]).rows] == ["", "", "bold"]
    console = Console(width=100, force_terminal=True, color_system="standard", legacy_windows=False)
    with console.capture() as shown:
        console.print(table)
    bold = [line for line in shown.get().splitlines() if "36.0" in line]
    assert len(bold) == 1 and "middle" in bold[0] and "\x1b[1m" in bold[0]


def test_drafts_are_called_what_distinguishes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a folder is called by its last part, also if the path is "." or ends with a slash; a hub id is whole;
    folders with the same last part are called as they were given, on 80 columns without a cut. Conclusive: a hub id is
    no folder here, and the last parts of two of the paths are equal."""
    for name in ("a/draft", "b/draft", "b/small"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "b")
    a, b = f"{tmp_path}/a/draft", f"{tmp_path}/b/draft"
    assert names_of([a, f"{tmp_path}/b/small/", "owner/draft"]) == ["draft", "small", "owner/draft"]
    assert names_of([a, b, "."]) == [a, b, "b"] and names_of([b]) == ["draft"]
    console = Console(width=80)
    long = "/a/long/path/of/folders/to/a/" * 3 + "draft"
    with console.capture() as shown:
        console.print(sweep_table([advice_with(long, 24.0, 1), advice_with("owner/draft", 20.0, 1)]))
    rows = [line.split("│") for line in shown.get().splitlines() if line.startswith("│")]
    assert "".join(row[1].strip() for row in rows) == f"{long}owner/draft"


def test_the_picture_shows_every_cell_and_every_draft() -> None:
    """Claim: its left half has a place for each class and temperature with the acceptance of each rule, its right half
    a line of tokens/s over the round trip for each draft, and plain decoding. By hand: with one draft token of which
    half pass, a round of 50 ms and the round trip beyond 3 ms has 1.5 tokens."""
    pytest.importorskip("matplotlib")
    one, two = advice_with("one", 24.0, 1), advice_with("two", 36.0, 1)
    greedy, sampled = (cells_of([measured_text(name, 0.5, 0.25)])[0] for name in ("facts", "code"))
    rules = {"COUPLED": Estimate(0.25, 0.2, 0.3), "REJECTION": Estimate(0.75, 0.7, 0.8)}
    cells = [greedy, replace(sampled, temperature=0.7, acceptance=rules)]
    advices = [replace(one, cells=cells, plans=one.plans * 8), replace(two, plans=two.plans * 8)]
    picture = picture_of(advices, [TIMES] * 2)
    left, right = picture.axes
    assert [text.get_text() for text in left.texts] == ["0.50", "nan", "nan", "0.25 / 0.75"]
    assert [label.get_text() for label in left.get_yticklabels()] == ["facts", "code"]
    assert [label.get_text() for label in left.get_xticklabels()] == ["0\nGREEDY", "0.7\nCOUPLED / REJECTION"]
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["one", "two", "plain decoding"]
    first = right.lines[0]
    found = dict(zip(first.get_xdata(), first.get_ydata()))
    assert found[RTTS_MS[0]] == pytest.approx(1.5 / (0.047 + RTTS_MS[0] / 1e3)) and len(found) == len(RTTS_MS)
    assert list(right.lines[2].get_ydata()) == [20.0, 20.0]


def test_a_picture_that_cannot_be_drawn_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: without matplotlib, and for a folder that is not there, --plot is refused before anything is read.
    Conclusive: models and prompts are missing too, and the sentence is not about them."""
    asked = AdviseSettings(target="/nonexistent", draft="/nonexistent", prompts=tmp_path / "none", plot=tmp_path / "a")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--plot needs matplotlib"):
        advise(asked)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match="there is no folder .*none"):
        advise(asked.model_copy(update={"plot": tmp_path / "none" / "a.png"}))
    with pytest.raises(ConfigError, match="/nonexistent"):
        advise(asked)
