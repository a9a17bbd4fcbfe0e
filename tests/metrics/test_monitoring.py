"""The rules, the dashboard and the docs against each other and against what running services export."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hygiene.sources import ROOT
from tests.support.pages import Watched, read_text

FOLDER = ROOT / "deploy" / "monitoring"
DOCS = ROOT / "docs" / "metrics.md"
PROMETHEUS_OWN = {"up"}  # made by Prometheus for every page it reads
NAME = re.compile(r"\b(?:(?:specdec|process)_[a-z0-9_]+|vllm:[a-z0-9_]+|up)\b(?=\s*[{\[)\s+*/><=-]|$)")
IN_DOCS = re.compile(r"`((?:specdec|process)_[a-z0-9_]+|vllm:[a-z0-9_]+)`")
SUFFIXES = ("_bucket", "_count", "_sum")

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (prometheus)")


def rules() -> list[dict[str, Any]]:
    """All alarms."""
    loaded = yaml.safe_load((FOLDER / "rules.yaml").read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def expressions() -> dict[str, str]:
    """Every PromQL expression of rules and dashboard, by its rule or panel."""
    board = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    found = {f"rule {rule['alert']}": rule["expr"] for rule in rules()}
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            found[f"panel {panel['title']} {target['refId']}"] = target["expr"]
    return found


def named_in(expression: str) -> set[str]:
    """The metrics an expression reads; label values are no names."""
    return set(NAME.findall(re.sub(r'"[^"]*"', '""', expression)))


def exported(services: Watched) -> set[str]:
    """Names of all samples on all pages."""
    return {name for service in services.addresses for name in services.page(service).names}


def check(*command: str, cwd: Path = FOLDER) -> subprocess.CompletedProcess:
    """Runs promtool."""
    return subprocess.run(["promtool", *command], cwd=cwd, capture_output=True, text=True, timeout=60)


def test_rules_and_dashboard_name_only_what_is_exported(services: Watched):
    """Claim: every metric that an alarm or a panel reads is exported by a running service. Conclusive: names are taken
    from every expression, each has at least one, and a planted wrong one is found missing."""
    there = exported(services) | PROMETHEUS_OWN
    for place, expression in expressions().items():
        names = named_in(expression)
        assert names and names <= there, f"{place}: {sorted(names - there)}"
    assert named_in('rate(specdec_gone_total{a="up"}[5m]) / vllm:x') == {"specdec_gone_total", "vllm:x"}


def test_the_docs_list_exactly_what_is_exported(services: Watched):
    """Claim: docs/metrics.md names every metric a service exports, and none that does not exist, and each has a help,
    which explains it."""
    text = DOCS.read_text(encoding="utf-8")
    listed = set(IN_DOCS.findall("\n".join(line for line in text.splitlines() if line.startswith("|"))))
    there = {
        name.removesuffix(next((end for end in SUFFIXES if name.endswith(end)), "")) for name in exported(services)
    }
    assert sorted(listed ^ there) == []
    for address in services.addresses.values():
        types, helps = (
            re.findall(rf"^# {word} (\S+) \S", read_text(address), re.MULTILINE) for word in ("TYPE", "HELP")
        )
        assert sorted(types) == sorted(helps) != []


def test_alarms_say_what_they_are_for():
    """Claim: each alarm has a severity people sort by, a summary, a description and a remedy, and is unit-tested: once
    where it fires, with its text, and once where it is silent."""
    tests = [
        test
        for group in yaml.safe_load((FOLDER / "rules_test.yaml").read_text())["tests"]
        for test in group["alert_rule_test"]
    ]
    fires = {test["alertname"] for test in tests if test.get("exp_alerts")}
    silent = {test["alertname"] for test in tests if not test.get("exp_alerts")}
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert {"summary", "description", "remedy"} == rule["annotations"].keys()
        assert rule["alert"] in fires & silent, rule["alert"]


@needs_promtool
def test_promtool_takes_rules_and_configuration():
    """Claim: Prometheus itself accepts rules and configuration."""
    for command in (("check", "rules", "rules.yaml"), ("check", "config", "prometheus.yaml")):
        done = check(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout + done.stderr


@needs_promtool
def test_every_alarm_fires_and_stays_silent(tmp_path: Path):
    """Claim: the unit tests of the rules hold, so each alarm fires at its symptom only. Conclusive: with
    alarms that never fire, and with alarms that always do, promtool reports every one."""
    done = check("test", "rules", "rules_test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copy(FOLDER / "rules_test.yaml", tmp_path)
    loaded = yaml.safe_load((FOLDER / "rules.yaml").read_text())
    names = {rule["alert"] for rule in loaded["groups"][0]["rules"]}
    for wrong in ("vector(1) < 0", "vector(1)"):
        for rule in loaded["groups"][0]["rules"]:
            rule["expr"], rule["for"] = wrong, "0s"
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump(loaded))
        done = check("test", "rules", "rules_test.yaml", cwd=tmp_path)
        assert done.returncode != 0
        assert set(re.findall(r"alertname: ?(\w+)", done.stdout + done.stderr)) == names, wrong
