"""The network policies of every overlay allow the connections its pods need, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specdec.gateway_settings import GatewaySettings
from specdec.settings import split_address
from tests.deploy.compose import OWN, compose
from tests.deploy.flows import CLIENT, MONITORING, NEIGHBOUR, OUTSIDE, PRIVATE, STRANGER, Flow, allowed, needed
from tests.deploy.manifests import OVERLAYS, Object, example, of_kind, overlay, own_pods, pods, settings_of

RANDOM_PORT = 40000  # any that no manifest names


def ports_of(objects: tuple[Object, ...]) -> list[tuple[str, int]]:
    """Every port that a container names, those of DNS and of the hub, and one that no manifest names."""
    lists = [each.get("ports", ()) for pod in pods(objects) for each in pod.containers]
    named = {port["containerPort"] for ports in lists for port in ports}
    return [("TCP", port) for port in sorted({*named, 53, 443, RANDOM_PORT})] + [("UDP", 53), ("UDP", RANDOM_PORT)]


@pytest.mark.parametrize("name", OVERLAYS)
def test_policies_allow_what_settings_name_and_nothing_else(name: str, secrets: Path) -> None:
    """Claim: the flows that the policies allow are exactly those that the settings of the pods need.

    Conclusive: both sets are computed over all pairs of pods, outside places and ports, one from the policies by the
    rules of Kubernetes, the other from the settings that the real command reads from arguments and variables.
    """
    objects = overlay(name)
    ports = ports_of(objects)
    is_allowed, is_needed = allowed(objects, OUTSIDE, ports), needed(objects, secrets, ports)
    assert is_needed - is_allowed == set(), "needed, and not allowed"
    assert is_allowed - is_needed == set(), "allowed, and not needed"
    assert any(flow.source == CLIENT.name for flow in is_allowed)
    assert not {STRANGER.name, NEIGHBOUR.name} & {flow.source for flow in is_allowed}


@pytest.mark.parametrize("name", ("cpu-demo", "mtls"))
def test_a_cluster_s_own_monitoring_is_let_in(name: str, secrets: Path, tmp_path: Path) -> None:
    """Claim: with the lines of components/own-monitoring, a Prometheus of a namespace with the label reaches the pods
    at the metrics, they reach its collector at port 4317, and no other flow is allowed. Conclusive: the file's own
    lines are rendered, and the flows compared as above; without the component none of these is allowed."""
    objects = example("own-monitoring/kustomization.yaml", tmp_path, name)
    ports = ports_of(objects) + [("TCP", 4317)]
    scraping, sending = set(), set()
    for pod in pods(objects):
        settings = settings_of(pod, objects, secrets)
        if settings is not None:
            assert settings.metrics_address
            scraping.add(Flow(MONITORING.name, pod.owner, "TCP", split_address(settings.metrics_address)[1]))
            if not isinstance(settings, GatewaySettings):  # it writes no spans
                sending.add(Flow(pod.owner, MONITORING.name, "TCP", 4317))
    is_allowed, is_needed = allowed(objects, OUTSIDE, ports), needed(objects, secrets, ports)
    assert len(sending) == 3 and sending <= is_needed, "the lines tell each service where its spans go"
    assert is_allowed == is_needed | scraping
    assert not (scraping | sending) & allowed(overlay(name), OUTSIDE, ports)


def test_the_hub_is_reached_over_both_protocols() -> None:
    """Claim: the job that fetches models may reach the internet over IPv4 and IPv6, private networks left out of both.
    Source: on a cluster of IPv6 alone a rule for 0.0.0.0/0 lets nothing through, and the flows above do not tell one
    protocol from the other."""
    (policy,) = [one for one in of_kind(overlay("gpu"), "NetworkPolicy") if one["metadata"]["name"] == "specdec-fetch"]
    (rule,) = policy["spec"]["egress"]
    excepted = {peer["ipBlock"]["cidr"]: set(peer["ipBlock"]["except"]) for peer in rule["to"]}
    assert excepted.keys() == PRIVATE.keys() and all(excepted[block] >= PRIVATE[block] for block in PRIVATE)


def test_manifests_listen_on_both_protocols() -> None:
    """Claim: every address that a pod of ours, or a service of the compose file, listens on for others is `::`.
    Conclusive: `test_server` reaches a server on `::` over both protocols; on a machine without IPv6 it is 0.0.0.0."""
    containers = [container for name in OVERLAYS for pod in own_pods(name) for container in pod.containers]
    texts = [text for container in containers for text in container.get("args", ())]
    texts += [text for name in OWN for text in compose()["services"][name]["command"]]
    listening = [text.partition("=")[2] for text in texts if re.match("--(host|health-address|metrics-address)=", text)]
    hosts = {re.sub(r"(?<=[\w\]]):\d+$", "", text) for text in listening}
    assert len(listening) > 20 and hosts == {"::", "[::]", "127.0.0.1"}  # the health check of compose is inside


def test_the_evaluation_finds_what_is_missing_and_what_is_too_much(secrets: Path) -> None:
    """Claim: the check above can fail: without one policy a needed flow is missing, without the default denial a pod is
    open in the direction that no other policy covers."""
    objects = overlay("cpu-demo")
    ports = ports_of(objects)
    without = {
        name: tuple(content for content in objects if content["metadata"]["name"] != name or content["kind"] != kind)
        for name, kind in (("default-deny", "NetworkPolicy"), ("specdec-draft", "NetworkPolicy"))
    }
    link = Flow("Deployment/specdec-coordinator", "Deployment/specdec-draft", "TCP", 50053)
    assert link in allowed(objects, OUTSIDE, ports)
    assert link not in allowed(without["specdec-draft"], OUTSIDE, ports)
    opened = allowed(without["default-deny"], OUTSIDE, ports) - needed(objects, secrets, ports)
    assert Flow("Deployment/specdec-draft", "internet", "TCP", RANDOM_PORT) in opened
