"""The gateway's page in a real headless Chromium, on real services: the shipped pair, a coordinator, a gateway."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.gateway.keys import new_key
from tests.support.gateways import events_of, gateway
from tests.support.services import Services, fixed

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[page]'")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed: pip install '.[page]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"),
]
expect = sync_api.expect
PATIENCE_MS = 60_000.0
SPEAK_EVERY_MS = 3000
TREE = fixed(12, draft_window=12, draft_nodes_per_step=6, draft_siblings=2, draft_wait_ms=2000)
HOSTILE = '<img src=x onerror="window.planted=1"><script>window.planted=1</script>&amp;'


@pytest.fixture(scope="module")
def plain(services: Services) -> Iterator[str]:
    """The address of a gateway without keys, whose model has no chat template."""
    with gateway(services.coordinator.address) as child:
        yield child.address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; a container has no user namespaces for its sandbox."""
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, plain: str) -> Iterator[Open]:
    """Opens the page: `opened(width=…, scheme=…, motion=…, address=…)`. At the end of the test, no page may have had an
    uncaught error, a resource from elsewhere, or one that its policy refused."""
    pages, complaints = [], []

    def open_page(width: int = 1180, scheme: str = "light", motion: str = "reduce", address: str = plain) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion=motion)
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if "Content Security" in line.text else None)
        page.on("request", lambda asked: None if f"//{address}/" in asked.url else complaints.append(asked.url))
        page.goto(f"http://{address}/")
        expect(page.locator("#model")).not_to_be_empty() if address == plain else None
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert not complaints


def run_both(page: Any, **fields: str) -> None:
    """Fills fields of the form, and runs to the end of the replay."""
    for name, value in fields.items():
        page.locator(f"[name={name}]").fill(value)
    page.locator("#run").click()
    expect(page.locator("#replay")).to_be_enabled(timeout=PATIENCE_MS)


def speculating_with(page: Any, speculative: dict[str, Any]) -> None:
    """Adds to `speculative` of the requests that speculate, as the page's own form does not."""

    def add(route: Any) -> None:
        body = json.loads(route.request.post_data)
        if body["speculative"]["enabled"]:
            body["speculative"] |= {**speculative, "policy": "fixed"}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/completions", add)


@pytest.mark.parametrize("shape", [fixed(6, draft_wait_ms=2000), TREE], ids=["chain", "tree"])
def test_what_is_shown_is_what_came(opened: Open, shape: dict[str, Any]) -> None:
    """Claim: both texts, the form of every token, the counts of rounds, and the tokens kept, are those of the streams;
    the counts are the request's statistics; both requests are in turn; the factor is the ratio of the speeds shown.

    Conclusive: statistics are counted by the coordinator, the page counts the rounds that it draws; each is read
    separately, from the streams as the browser got them.
    """
    page, answers = opened(), []
    speculating_with(page, shape)
    page.on("response", lambda answer: answers.append(answer) if answer.request.method == "POST" else None)
    run_both(page)
    spans = "performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/v1/completions'))"
    first, second = page.evaluate(f"{spans}.map((one) => [one.startTime, one.responseEnd])")
    assert first[1] <= second[0]
    on, off = (events_of(answer.body()) for answer in answers)
    statistics = next(own["statistics"] for event in on if "statistics" in (own := event.get("speculative", {})))
    rounds = [one for event in on for one in event.get("speculative", {}).get("rounds", [])]
    kinds = [kind for event in on for kind in event.get("speculative", {}).get("kinds", [])]
    counts = page.locator("#round-counts").evaluate("element => ({...element.dataset})")
    assert int(counts["rounds"]) == statistics["rounds"] == len(rounds) == page.locator("#round-list > li").count()
    assert int(counts["offered"]) == statistics["num_draft_tokens"] > 0
    assert int(counts["accepted"]) == statistics["num_accepted_draft_tokens"] > 0
    assert int(counts["struck"]) + int(counts["discarded"]) == int(counts["offered"]) - int(counts["accepted"])
    if shape is TREE:
        assert statistics["num_paths"] > statistics["num_spec_steps"]
        assert page.locator("#round-list .stack").count() > 0
    for column, events in (("#on", on), ("#off", off)):
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        assert page.locator(f"{column} .text").evaluate("element => element.textContent") == text
    assert page.locator("#on .text .token").evaluate_all("all => all.map((one) => one.classList[1])") == kinds
    offered = page.locator("#round-list .offer")
    for index, own in enumerate(rounds):
        row = offered.nth(index)
        for state, count in (("accepted", len(own["accepted"])), ("token", len(own["draft_token_ids"]) + 1)):
            assert row.locator(f".{state}").count() == count or index == len(rounds) - 1
    check_times(page, rounds)
    speeds = [float(page.locator(f"{column} .speed strong").text_content()) for column in ("#on", "#off")]
    factor = float(page.locator("#factor").text_content().split()[0])
    assert abs(factor - speeds[0] / speeds[1]) < 0.02 * factor + 0.01
    assert "Both texts are the same." in page.locator("#summary").text_content()


def check_times(page: Any, rounds: list[dict[str, Any]]) -> None:
    """Checks the numbers and the parts of the bars of the first rounds."""
    at_target = "target_queue_s", "target_forward_s", "target_sampling_s", "target_heads_s"
    fields = ("draft_wait_s", "target_link_s", *at_target, "round_s")
    for index, own in enumerate(rounds[:10]):
        row = page.locator("#round-list > li").nth(index)
        numbers = re.findall(r"\d+\.\d\d", row.locator(".numbers").text_content())
        assert (
            numbers == [f"{1000 * own[name]:.2f}" for name in fields]
            or max(abs(float(number) - 1000 * own[name]) for number, name in zip(numbers, fields, strict=True)) < 0.011
        )
        shares = row.locator(".part").evaluate_all("all => all.map((one) => parseFloat(one.style.width))")
        assert shares == pytest.approx([100 * own[name] / own["round_s"] for name in fields[:-1]], abs=0.01)


def tab_to(page: Any, selector: str) -> None:
    """Presses Tab until the focus is on such an element."""
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{selector} is not reached by Tab")


def test_the_keyboard_is_enough(opened: Open) -> None:
    """Claim: with Tab, arrows and Enter alone one asks, reads origin, proposer and log-probability of every token,
    replays, and stops a running stream, after which no further request is sent. Conclusive: no pointer is used, and the
    details of all tokens are read one by one and counted against the counts shown."""
    page, asked = opened(), []
    page.on("request", lambda request: asked.append(request.url) if request.method == "POST" else None)
    tab_to(page, "[name=prompt]")
    page.keyboard.press("Control+A")
    page.keyboard.type("import os\n")
    tab_to(page, "#run")
    page.keyboard.press("Enter")
    expect(page.locator("#replay")).to_be_enabled(timeout=PATIENCE_MS)
    assert page.evaluate("document.activeElement.id") == "run"
    tab_to(page, "#replay")
    page.keyboard.press("Enter")
    tab_to(page, "#on .token")
    details = [page.locator("#on-detail").text_content()]
    for _ in range(page.locator("#on .text .token:not(:empty)").count() - 1):
        page.keyboard.press("ArrowRight")
        details.append(page.locator("#on-detail").text_content())
    assert all(re.search(r"Token \d+ “.+”, (accepted|recovered|bonus),.* logprob -?\d", one) for one in details)
    accepted = [one for one in details if ", accepted, proposed by the draft model" in one]
    assert len(set(details)) == len(details)
    assert len(accepted) == page.locator("#on .text .accepted:not(:empty)").count() > 0
    tab_to(page, "#off .token")
    assert "bonus" in page.locator("#off-detail").text_content() and len(asked) == 2
    page.locator("[name=max_tokens]").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("1900")
    tab_to(page, "#run")
    page.keyboard.press("Enter")
    expect(page.locator("#on .text .token").nth(3)).to_be_attached()
    assert page.evaluate("document.activeElement.id") == "stop"
    page.keyboard.press("Enter")
    expect(page.locator("#summary")).to_have_text("Stopped.")
    count = page.locator("#on .text .token").count()
    page.wait_for_timeout(500)
    assert page.locator("#on .text .token").count() == count < 1900 and len(asked) == 3


def test_model_text_is_never_markup(opened: Open) -> None:
    """Claim: text of model and server enters as text, wherever it is shown. Conclusive: tags that would run a program
    are answered for each such text, are found on the page letter by letter, and neither ran nor became elements."""
    page = opened()
    token = {"index": 0, "text": HOSTILE, "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": None}
    times = dict.fromkeys(("round_s", "draft_wait_s", "target_queue_s", "target_forward_s", "target_link_s"), 0.001)
    one = {"round_index": 0, "draft_token_ids": [7], "draft_texts": [HOSTILE], "parents": [0], "proposers": [HOSTILE]}
    one |= {"accepted": [], "num_output_tokens": 1, "target_sampling_s": 0.0, "target_heads_s": 0.0, **times}
    origin = {"kinds": ["recovered"], "proposers": [None], "text_lengths": [len(HOSTILE)], "rounds": [one]}
    events = [{"choices": [token], "speculative": origin}, {"error": {"message": HOSTILE}}]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    models = json.dumps({"data": [{"id": HOSTILE}]})
    page.route("**/v1/models", lambda route: route.fulfill(body=models, content_type="application/json"))
    page.route("**/v1/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
    page.reload()
    expect(page.locator("#model")).to_have_text(f"Model: {HOSTILE}")
    page.locator("#run").click()
    expect(page.locator("#error")).to_have_text(HOSTILE)
    assert page.locator("#on .text").text_content() == HOSTILE
    page.locator("#on .text .token").focus()
    shown = HOSTILE.replace(" ", "·")
    assert shown in page.locator("#on-detail").text_content()
    assert page.locator("#round-list").text_content().count(shown) == 2
    assert page.evaluate("window.planted === undefined && !document.querySelector('main img, main script')")


@pytest.mark.parametrize("width", [320, 1180])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible(opened: Open, scheme: str, width: int) -> None:
    """Claim: axe finds nothing, empty, with results of a tree, and with an error, in both schemes; nothing is wider
    than a window of 320 px. Conclusive: axe names a planted image without a text, so it does look."""
    page = opened(width=width, scheme=scheme)
    page.route("**/tokenizer_info", lambda route: route.fulfill(json={"chat_template": "a template"}))
    assert problems_of(page) == [] and is_narrow(page)
    speculating_with(page, TREE)
    run_both(page, prompt="def a_name_that_has_no_end" * 4)
    page.locator("#on .text .token").first.focus()
    assert problems_of(page) == [] and is_narrow(page)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", paper)[0]) < 128) == (scheme == "dark")
    page.reload()
    expect(page.locator("#system-field")).to_be_visible()
    page.locator("[name=prompt]").fill("no template here")
    page.locator("#run").click()
    expect(page.locator("#error")).to_be_visible()
    assert problems_of(page) == [] and is_narrow(page)
    page.evaluate("document.querySelector('main').append(Object.assign(new Image(), {src: 'static/icon.svg'}))")
    assert problems_of(page) == ["image-alt"]


def problems_of(page: Any) -> list[str]:
    """The rules of axe that the page breaks."""
    return [one["id"] for one in axe.Axe().run(page).response["violations"]]


def is_narrow(page: Any) -> bool:
    """Whether nothing is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_replay_keeps_the_time_stamps(opened: Open) -> None:
    """Claim: a replay lasts as long as the slower run after its first token, times the slowness chosen, and shows both
    at once; where motion is not wanted, both texts are there at once. Conclusive: the time expected is computed from
    the speed and the number of tokens shown; the two columns are sampled while it runs."""
    page = opened(motion="no-preference")
    run_both(page)
    totals = [page.locator(f"{column} .text .token").count() for column in ("#on", "#off")]
    speeds = [float(page.locator(f"{column} .speed strong").text_content()) for column in ("#on", "#off")]
    page.locator("#slowdown").select_option("16")
    samples = page.evaluate(
        """() => new Promise((resolve) => {
          const count = (id) => document.querySelectorAll(`#${id} .text .token`).length;
          const replay = document.getElementById("replay");
          const start = performance.now(), samples = [];
          replay.click();
          const look = () => {
            samples.push([performance.now() - start, count("on"), count("off")]);
            if (replay.disabled) requestAnimationFrame(look); else resolve(samples);
          };
          look();
        })"""
    )
    expected_ms = max(16_000 * (total - 1) / speed for total, speed in zip(totals, speeds))
    assert samples[-1][1:] == totals and 0.8 * expected_ms - 200 < samples[-1][0] < 1.2 * expected_ms + 1000
    assert sum(0 < on < totals[0] and 0 < off < totals[1] for _, on, off in samples) > 5
    still = opened(motion="reduce")
    run_both(still)
    still.locator("#slowdown").select_option("64")
    counts = "['on', 'off'].map((id) => document.querySelectorAll(`#${id} .text .token`).length)"
    assert still.evaluate(f"document.getElementById('replay').click(), {counts}") == totals


def test_the_live_region_is_calm(opened: Open) -> None:
    """Claim: of a long run the live region says something, and at most once in 3 s. Conclusive: an observer notes the
    time of each change, and tokens come many times as often."""
    page = opened()
    page.evaluate(
        """() => {
          window.said = [];
          new MutationObserver(() => said.push([performance.now(), document.getElementById("live").textContent]))
            .observe(document.getElementById("live"), {childList: true, characterData: true, subtree: true});
        }"""
    )
    run_both(page, max_tokens="1500", temperature="0")
    page.wait_for_timeout(SPEAK_EVERY_MS + 500)
    said = page.evaluate("said")
    assert len(said) >= 2 and "Both texts are the same." in said[-1][1]
    assert all(later[0] - sooner[0] >= SPEAK_EVERY_MS - 5 for sooner, later in zip(said, said[1:]))
    assert page.locator("#on .text .token").count() > 20 * len(said)


def answer_once(page: Any, body: str) -> None:
    """Answers the next request itself."""
    page.route("**/v1/completions", lambda route: route.fulfill(body=body), times=1)


def test_errors_are_said_in_words(opened: Open, services: Services, tmp_path: Path) -> None:
    """Claim: what a server refuses, an error in mid-stream, a stream that breaks off and a gateway that is gone are
    each said in words, and the page can be used again; a gateway with keys is asked with one. Conclusive: the words are
    the server's where it answered, and the last run of each page ends well."""
    page = opened()
    page.locator("[name=temperature]").fill("0.001")
    page.locator("#run").click()
    expect(page.locator("#error")).to_contain_text("temperature is 0.001")
    for body, words in (
        ('data: {"error": {"message": "the target is lost"}}\n\n', "the target is lost"),
        (": ping\n\n", "broke off"),
        ("data: {\n\n", "does not understand"),
    ):
        answer_once(page, body)
        page.locator("#run").click()
        expect(page.locator("#error")).to_contain_text(words)
    run_both(page, temperature="0.7")
    expect(page.locator("#error")).to_be_hidden()
    key, line = new_key("reader")
    (tmp_path / "keys").write_text(line + "\n", encoding="utf-8")
    with gateway(services.coordinator.address, api_keys_file=tmp_path / "keys") as guarded:
        locked = opened(address=guarded.address)
        expect(locked.locator("#error")).to_contain_text("give a key")
        expect(locked.locator("[name=key]")).to_be_focused()
        run_both(locked, key=key)
        assert "Both texts are the same." in locked.locator("#summary").text_content()
        guarded.stop()
        locked.locator("#run").click()
        expect(locked.locator("#error")).to_contain_text("does not answer")


def test_a_chat_is_asked(opened: Open, address: str) -> None:
    """Claim: where the model has a chat template, the page asks in messages, with a system message if one is given; a
    model without is asked in plain text. Conclusive: two gateways that differ in the template; the messages that one of
    them got, and what it answered."""
    page = opened()
    expect(page.locator("[value=chat]")).to_be_disabled()
    chat, sent = opened(address=address), []
    chat.on("request", lambda asked: sent.append(asked.post_data_json) if asked.method == "POST" else None)
    expect(chat.locator("[value=chat]")).to_be_checked()
    run_both(chat, system="Be short.", prompt="Hello")
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    assert [body["messages"] for body in sent] == [messages] * 2
    assert "Both texts are the same." in chat.locator("#summary").text_content()
    assert chat.locator("#on .text .token").count() > 0 and chat.locator("#round-list > li").count() > 0
