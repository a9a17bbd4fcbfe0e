"""The network policies of every overlay allow what its pods need to say to each other, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.flows import CLIENT, NEIGHBOUR, OUTSIDE, STRANGER, Flow, allowed, needed
from tests.deploy.manifests import OVERLAYS, Object, overlay, pods

RANDOM_PORT = 40000  # any that no manifest names


def ports_of(objects: tuple[Object, ...]) -> list[tuple[str, int]]:
    """Every port a container names, those of names and of the hub, and one that nobody names."""
    lists = [each.get("ports", ()) for pod in pods(objects) for each in pod.containers]
    named = {port["containerPort"] for ports in lists for port in ports}
    return [("TCP", port) for port in sorted({*named, 53, 443, RANDOM_PORT})] + [("UDP", 53), ("UDP", RANDOM_PORT)]


@pytest.mark.parametrize("name", OVERLAYS)
def test_policies_allow_what_settings_name_and_nothing_else(name: str, secrets: Path) -> None:
    """Claim: the flows that the policies allow are exactly those that the settings of the pods need.

    Conclusive: both sets are worked out over all pairs of pods, outside places and ports, one from the policies by the
    rules of Kubernetes, the other from what the real command reads from arguments and variables.
    """
    objects = overlay(name)
    ports = ports_of(objects)
    is_allowed, is_needed = allowed(objects, OUTSIDE, ports), needed(objects, secrets, ports)
    assert is_needed - is_allowed == set(), "needed, and not allowed"
    assert is_allowed - is_needed == set(), "allowed, and not needed"
    assert any(flow.source == CLIENT.name for flow in is_allowed)
    assert not {STRANGER.name, NEIGHBOUR.name} & {flow.source for flow in is_allowed}


def test_the_evaluation_finds_what_is_missing_and_what_is_too_much(secrets: Path) -> None:
    """Claim: the check above can fail: without one policy a needed flow is missing, without the one that denies all
    others a pod is open in the direction no other policy speaks of."""
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
