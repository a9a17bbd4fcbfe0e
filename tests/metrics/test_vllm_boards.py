"""vLLM's published boards on our pages, evaluated by a real Prometheus."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.coordinator.statistics import FIRST_TOKEN_BOUNDS_S, LENGTH_BOUNDS, REQUEST_BOUNDS_S, TOKEN_BOUNDS_S
from tests.metrics.test_monitoring import DOCS
from tests.metrics.vllm_boards import (
    OVERVIEW,
    OVERVIEW_MATCHERS,
    SLOS,
    SPECULATIVE,
    SPECULATIVE_MATCHERS,
    VARIABLES,
)
from tests.support.pages import Watched, free_address, watched
from tests.support.services import fixed
from tests.support.waiting import until

SCRAPE_S, RATE_S, RANGE_S = 1, 10, 30
READINGS_MIN = 4  # of a counter, before rates are asked for
FINISHES = "stop", "length", "abort"
# Bounds of vLLM's histograms: vllm/v1/metrics/loggers.py of the commit of the boards.
VLLM_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
VLLM_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
VLLM_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40)
VLLM_FIRST_TOKEN_S += (80, 160, 640, 2560)
VLLM_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Prometheus:
    """A real Prometheus that has read the pages of services at work."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of the API. Raises urllib.error.URLError."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"http://{self._address}/api/v1/{path}?{query}", timeout=10) as answer:
            return json.load(answer)["data"]

    def values(self, expression: str) -> list[float]:
        """The values of an expression, those that are no number left out."""
        found = [float(sample["value"][1]) for sample in self.ask("query", query=expression)["result"]]
        return [value for value in found if not math.isnan(value)]


@pytest.fixture(scope="module")
def prometheus(table_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It reads the pages of all three services each second, while texts of each finish reason are generated."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    folder, address = tmp_path_factory.mktemp("prometheus"), free_address()
    with ExitStack() as stack:
        services = stack.enter_context(watched(table_models))
        jobs = [
            {"job_name": f"specdec-{name}", "static_configs": [{"targets": [page]}]}
            for name, page in services.addresses.items()
        ]
        settings = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": jobs}
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
        command = ["prometheus", "--config.file", "prometheus.yaml", "--storage.tsdb.path", "data"]
        command += ["--web.listen-address", address, "--log.level", "error"]
        child = stack.enter_context(subprocess.Popen(command, cwd=folder))
        stack.callback(child.kill)
        made, is_over = Prometheus(address), threading.Event()
        stack.callback(is_over.set)
        working = threading.Thread(target=generate_all, args=(services, is_over))
        working.start()
        stack.callback(working.join)
        stack.callback(is_over.set)
        until(lambda: is_full(made), timeout_s=60.0)
        yield made


def generate_all(services: Watched, is_over: threading.Event) -> None:
    """Texts that end by a stop, at their length, and by their client's leaving, until it is over."""
    client, way = services.services.client, fixed(4, draft_window=8, draft_wait_ms=50)
    for seed in range(1_000_000):
        if is_over.is_set():
            return
        sampling = {"temperature": 0.9, "seed": seed, "max_tokens": 20}
        client.generate([1, 2, 3], speculative=way, ignore_eos=True, **sampling)
        client.generate([1, 2, 3], speculative=way, stop_token_ids=[0, 1, 2, 3, 4], **sampling)
        request = client.request([1, 2, 3], way, ignore_eos=True, temperature=0.9, max_tokens=450)
        call = client.stub.Generate(request, timeout=60)
        next(call)
        call.cancel()


def is_full(prometheus: Prometheus) -> bool:
    """Whether it has read enough of each finish reason for a rate."""
    try:
        counted = [
            prometheus.values(f'count_over_time(vllm:request_success_total{{finished_reason="{reason}"}}[{RATE_S}s])')
            for reason in FINISHES
        ]
        grown = prometheus.values(f"increase(vllm:request_success_total[{RATE_S}s]) > 0")
    except OSError:  # it does not listen yet
        return False
    return all(count and count[0] >= READINGS_MIN for count in counted) and len(grown) == len(FINISHES)


def panels_of(
    prometheus: Prometheus, board: dict[str, list[str]], matchers: str, **slos: str
) -> dict[str, list[list[float]]]:
    """The values of each expression of each panel, with all jobs, models, instances and engines selected."""
    times = {"rate_interval": f"{RATE_S}s", "range": f"{RANGE_S}s"}

    def filled(expression: str) -> str:
        for name, value in {"matchers": matchers, **slos}.items():
            expression = expression.replace(f"${name}", value)
        for name, value in times.items():
            expression = expression.replace(f"$__{name}", value)
        return re.sub(r"\$\w+", ".*", expression)

    return {panel: [prometheus.values(filled(own)) for own in queries] for panel, queries in board.items()}


@pytest.mark.more
def test_the_speculative_board_has_data_in_every_panel(prometheus: Prometheus) -> None:
    """Claim: every query of every panel of vLLM's board of speculative decoding has data, of the coordinator alone, and
    its variables have one value each. Conclusive: the published expressions are evaluated by Prometheus on what it read
    from all three pages; shares lie between 0 and 1, and an acceptance length is above 1."""
    for variable in VARIABLES:
        found = prometheus.ask(f"label/{variable}/values", **{"match[]": "vllm:num_requests_running"})
        assert len(found) == 1 and found[0], (variable, found)
    panels = panels_of(prometheus, SPECULATIVE, SPECULATIVE_MATCHERS)
    assert [panel for panel, queries in panels.items() if not all(queries)] == []
    for panel, queries in panels.items():
        for value in (value for values in queries for value in values):
            assert "rate" not in panel or 0 <= value <= 1, (panel, value)
            assert "length" not in panel or value > 1, (panel, value)


@pytest.mark.more
def test_the_page_says_which_panels_of_the_overview_are_empty(prometheus: Prometheus) -> None:
    """Claim: of vLLM's overview board exactly those panels stay empty, or lack a part, that docs/metrics.md names; each
    choice of its two objectives is a bound of the histogram. Conclusive: as for the other board."""
    panels = panels_of(prometheus, OVERVIEW, OVERVIEW_MATCHERS, ttft_slo="1.0", tpot_slo="0.1")
    empty = [panel for panel, queries in panels.items() if not any(queries)]
    partial = [panel for panel, queries in panels.items() if any(queries) and not all(queries)]
    text = " ".join(DOCS.read_text(encoding="utf-8").split())
    named = re.search(r"`vllm_overview.json`: (.*?) stay empty; (.*?) show a part", text)
    assert named is not None
    assert [set(re.findall(r"\*([^*]+)\*", part)) for part in named.groups()] == [set(empty), set(partial)]
    for name, choices in SLOS.items():
        for choice in choices:
            slos = {"ttft_slo": "1.0", "tpot_slo": "0.1", name: choice}
            panel = {"ttft_slo": "TTFT SLO", "tpot_slo": "TPOT SLO"}[name]
            board = {panel: OVERVIEW[panel]}
            assert all(panels_of(prometheus, board, OVERVIEW_MATCHERS, **slos)[panel]), (panel, choice)


def test_histograms_have_the_bounds_that_boards_select() -> None:
    """Claim: the histograms with vLLM's names have all of vLLM's bounds, in order."""
    for own, theirs in (
        (FIRST_TOKEN_BOUNDS_S, VLLM_FIRST_TOKEN_S),
        (TOKEN_BOUNDS_S, VLLM_TOKEN_S),
        (REQUEST_BOUNDS_S, VLLM_REQUEST_S),
        (LENGTH_BOUNDS, VLLM_LENGTHS),
    ):
        assert set(theirs) <= set(own) and list(own) == sorted(set(own))


def test_vllm_names_are_on_one_page(services: Watched) -> None:
    """Claim: only the coordinator's page has vLLM's names, each series with the target's model and engine 0: no sum
    counts anything twice."""
    for name in ("target", "draft"):
        assert not [own for own in services.page(name).names if own.startswith("vllm:")]
    facts = services.page("target").samples
    model = next(own.labels["model"] for own in facts if own.name == "specdec_service_info")
    theirs = [own for own in services.page("coordinator").samples if own.name.startswith("vllm:")]
    assert {(own.labels["model_name"], own.labels["engine"]) for own in theirs} == {(model, "0")}
