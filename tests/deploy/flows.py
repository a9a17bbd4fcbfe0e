"""Which connections network policies allow, and which the pods' own settings need: two sets that must be one.

Policies are evaluated as Kubernetes defines them: a pod selected by no policy of a direction is open in it, otherwise
a connection needs a rule of the sender's egress and one of the receiver's ingress. The places outside the namespace
that its pods connect with are named here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from specdec.config import CoordinatorSettings, RankSettings
from specdec.gateway_settings import GatewaySettings
from specdec.settings import split_address
from tests.deploy.manifests import Object, Pod, Served, environment_of, of_kind, pods, settings_of

HUB_PORT = 443
COORDINATOR_PORT = 50051
GATEWAY_PORT = 8000
RAY_NODES = ("ray-head", "ray-target", "ray-draft")
RAY_JOBS = "specdec-ray-head-svc", 8265  # KubeRay makes this service for the head of the cluster specdec-ray
COLLECTOR = "collector.observability"  # one that a cluster has already, as docs/operations.md calls it
# Where pods and nodes have their addresses, by the block that holds them.
PRIVATE = {"0.0.0.0/0": {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"}, "::/0": {"fc00::/7", "fe80::/10"}}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a connection starts or ends. `namespace` "" is outside the cluster: no selector finds it."""

    name: str
    namespace: str
    labels: tuple[tuple[str, str], ...] = ()
    namespace_labels: tuple[tuple[str, str], ...] = ()  # beside the name, which every namespace has as a label

    @classmethod
    def of(cls, pod: Pod) -> Place:
        """Where a pod is."""
        return cls(pod.owner, pod.namespace, tuple(sorted(pod.labels.items())))

    def matches(self, selector: Object | None) -> bool:
        """Whether a label selector finds it; an absent one finds nothing, an empty one everything."""
        if selector is None:
            return False
        labels = dict(self.labels)
        for expression in selector.get("matchExpressions", ()):
            assert expression["operator"] == "In", expression
            if labels.get(expression["key"]) not in expression["values"]:
                return False
        return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


@dataclass(frozen=True, slots=True, order=True)
class Flow:
    """One kind of connection: source, destination, TCP or UDP, port of the destination."""

    source: str
    destination: str
    protocol: str
    port: int


NAMES = Place("names", "kube-system", (("k8s-app", "kube-dns"),))
INTERNET = Place("internet", "")
CLIENT = Place("client", "apps", (("specdec.client", "true"),))
STRANGER = Place("stranger", "apps")
NEIGHBOUR = Place("neighbour", "specdec", (("app", "other"),))
MONITORING = Place("monitoring", "observability", (), (("specdec.monitoring", "true"),))  # collector and Prometheus
SCALER = Place("scaler", "keda", (("app", "keda-operator"),))
OUTSIDE = (NAMES, INTERNET, CLIENT, STRANGER, NEIGHBOUR, MONITORING, SCALER)


def places_of(objects: tuple[Object, ...]) -> list[Place]:
    """The pods of an overlay."""
    return [Place.of(pod) for pod in pods(objects)]


def allowed(objects: tuple[Object, ...], others: Iterable[Place], ports: Iterable[tuple[str, int]]) -> set[Flow]:
    """Every flow between an overlay's pods, and between them and `others`, that the policies let through.

    Flows between two others are not the overlay's affair.
    """
    policies, own = of_kind(objects, "NetworkPolicy"), places_of(objects)
    return {
        Flow(source.name, destination.name, protocol, port)
        for source in (*own, *others)
        for destination in (*own, *others)
        if source in own or destination in own
        for protocol, port in ports
        if _passes(policies, "Egress", source, destination, protocol, port)
        and _passes(policies, "Ingress", destination, source, protocol, port)
    }


def _passes(policies: list[Object], direction: str, place: Place, peer: Place, protocol: str, port: int) -> bool:
    rules_key, peers_key = direction.lower(), {"Egress": "to", "Ingress": "from"}[direction]
    chosen = [
        policy
        for policy in policies
        if policy["metadata"]["namespace"] == place.namespace
        and direction in policy["spec"]["policyTypes"]
        and place.matches(policy["spec"]["podSelector"])
    ]
    return not chosen or any(
        _names_peer(rule.get(peers_key), peer, policy["metadata"]["namespace"])
        and _names_port(rule.get("ports"), protocol, port)
        for policy in chosen
        for rule in policy["spec"].get(rules_key) or ()
    )


def _names_peer(peers: list[Object] | None, peer: Place, namespace: str) -> bool:
    if peers is None:
        return True
    for selector in peers:
        assert selector.keys() <= {"podSelector", "namespaceSelector", "ipBlock"}, selector
        if "ipBlock" in selector:
            block = selector["ipBlock"]
            assert PRIVATE[block["cidr"]] <= set(block["except"]), "a block that reaches into the cluster"
            if not peer.namespace:
                return True
            continue
        home = Place("", "", (("kubernetes.io/metadata.name", peer.namespace), *peer.namespace_labels))
        is_there = peer.namespace == namespace
        if "namespaceSelector" in selector:
            is_there = home.matches(selector["namespaceSelector"])
        if peer.namespace and is_there and peer.matches(selector.get("podSelector", {})):
            return True
    return False


def _names_port(ports: list[Object] | None, protocol: str, port: int) -> bool:
    return ports is None or any(entry["port"] == port and entry["protocol"] == protocol for entry in ports)


def needed(objects: tuple[Object, ...], secrets: Path, ports: Iterable[tuple[str, int]]) -> set[Flow]:
    """The flows of the pods' settings: links, ranks, traces; and the scrapes, reads and fetches of the other pods."""
    return set(_needed(objects, secrets, list(ports)))


def _needed(objects: tuple[Object, ...], secrets: Path, ports: list[tuple[str, int]]) -> Iterator[Flow]:
    joined: list[str] = []  # pods that open ports to each other as they like
    for pod in pods(objects):
        settings = settings_of(pod, objects, secrets)
        component = pod.labels["app.kubernetes.io/component"]
        addresses = list(_addresses(settings) if settings else _addresses_of_others(component, objects))
        for host, port in addresses:
            yield from (Flow(pod.owner, receiver, "TCP", port) for receiver in _behind(host, objects))
        if component in RAY_NODES or (isinstance(settings, RankSettings) and settings.nnodes > 1):
            joined.append(pod.owner)
        if addresses or pod.owner in joined or component == "fetch":
            yield from (Flow(pod.owner, NAMES.name, protocol, 53) for protocol in ("TCP", "UDP"))
        if isinstance(settings, CoordinatorSettings) or component == "ray-target":
            yield Flow(CLIENT.name, pod.owner, "TCP", COORDINATOR_PORT)
        if isinstance(settings, GatewaySettings) or component == "ray-target":
            yield Flow(CLIENT.name, pod.owner, "TCP", GATEWAY_PORT)
        if component == "fetch":
            assert "HF_HOME" in environment_of(pod, pod.spec["containers"][0], objects)
            yield Flow(pod.owner, INTERNET.name, "TCP", HUB_PORT)
    yield from (Flow(one, other, *port) for one in joined for other in joined for port in ports)
    for scaler in of_kind(objects, "ScaledObject"):
        for trigger in scaler["spec"]["triggers"]:
            asked = urlsplit(trigger["metadata"]["serverAddress"])
            assert asked.hostname and asked.port
            service, _, namespace = asked.hostname.partition(".")
            assert namespace == "specdec"
            yield from (Flow(SCALER.name, pod, "TCP", asked.port) for pod in _behind(service, objects))


def _addresses(settings: Served) -> Iterator[tuple[str, int]]:
    """The addresses a service connects to, by host and port."""
    if isinstance(settings, GatewaySettings):
        yield from map(split_address, settings.address)
        return
    if isinstance(settings, CoordinatorSettings):
        yield from map(split_address, (*settings.target, *settings.draft))
    if settings.otlp_traces_endpoint:
        parts = urlsplit(settings.otlp_traces_endpoint)
        assert parts.hostname and parts.port
        yield parts.hostname, parts.port


def _addresses_of_others(component: str, objects: tuple[Object, ...]) -> Iterator[tuple[str, int]]:
    """The addresses that Prometheus, Grafana and Ray's job connect to, by their configuration."""
    if component == "prometheus":
        yield from scraped(_config(objects, "specdec-prometheus", "prometheus.yaml"))
    if component == "ray-up":
        yield RAY_JOBS
    if component == "grafana":
        for source in _config(objects, "specdec-grafana-datasources", None)["datasources"]:
            parts = urlsplit(source["url"])
            assert parts.hostname and parts.port
            yield parts.hostname, parts.port


def _config(objects: tuple[Object, ...], prefix: str, key: str | None) -> Object:
    """The YAML file in the config map whose generated name begins so; the only one where `key` is None."""
    found = [content for content in of_kind(objects, "ConfigMap") if content["metadata"]["name"].startswith(prefix)]
    assert len(found) == 1, f"{len(found)} config maps begin with {prefix}"
    data = found[0]["data"]
    (text,) = data.values() if key is None else (data[key],)
    content: Object = yaml.safe_load(text)
    return content


def scraped(config: Object) -> Iterator[tuple[str, int]]:
    """Host and port of all targets of a Prometheus configuration, Prometheus itself left out."""
    for job in config["scrape_configs"]:
        for static in job.get("static_configs", ()):
            yield from (split_address(target) for target in static["targets"] if not target.startswith("localhost"))
        for discovery in job.get("dns_sd_configs", ()):
            yield from ((name, discovery["port"]) for name in discovery["names"])


def _behind(host: str, objects: tuple[Object, ...]) -> list[str]:
    """The pods behind a service's name. Fails for a name without a service."""
    if host == RAY_JOBS[0]:
        return ["RayCluster/specdec-ray/head"]
    if host == COLLECTOR:
        return [MONITORING.name]
    found = [service for service in of_kind(objects, "Service") if service["metadata"]["name"] == host]
    assert len(found) == 1, f"{host} is the name of {len(found)} services"
    selector = {"matchLabels": found[0]["spec"]["selector"]}
    return [place.name for place in places_of(objects) if place.matches(selector)]
