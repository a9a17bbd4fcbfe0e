"""`specdec serve`: the services on this machine, and HTTP if asked for, until it is interrupted.

A service that ends is reported and restarted (`specdec.launch.supervisor`).
"""

from __future__ import annotations

import signal
import time

from specdec.config import ServeSettings
from specdec.gateway_settings import beside
from specdec.launch.serving import Serving, running
from specdec.launch.supervisor import Keeper
from specdec.settings import ServiceSettings
from specdec.streams import say

POLL_S = 0.2


def serve(settings: ServeSettings) -> int:
    """Runs until interrupted; returns the exit code. Raises SpecdecError when a service cannot start or is lost."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with running(settings) as serving:
            target, *draft, coordinator = (child.address for child in serving.children)
            say(f"specdec serves {settings.served_model_name or settings.model} on {coordinator}")
            where = f"draft on {draft[0]}" if draft else "no draft"
            say(f"target on {target}, {where}; Ctrl-C stops all")
            for gateway in serving.gateways:
                say(http_sentence(gateway.address))
            described = serving.descriptions.items()
            sizes = [f"{name}'s cache: {own.cache.sentence(own.positions_max)}" for name, own in described if own.cache]
            sizes += [own.draft_vocabulary_sentence for _, own in described if own.draft_vocabulary_sentence]
            say("\n".join(sizes))
            _watch(settings, serving)
        return 1
    except KeyboardInterrupt:
        return 0


def http_sentence(address: str) -> str:
    """Returns the base URL for OpenAI's clients, the address of the page, and a command that tries the interface."""
    body = '{"prompt": "Once upon a time", "max_tokens": 32}'
    command = f"curl http://{address}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
    page = f"a page that shows the rounds: http://{address}/"
    return f"OpenAI's interface: base URL http://{address}/v1; {page}; try\n  {command}"


def _watch(settings: ServeSettings, serving: Serving) -> None:
    """Restarts every service that ends. Never returns: raises ReplicaUnavailable when one is given up that the others
    need."""
    target, *draft, _ = (child.address for child in serving.children)
    own: list[ServiceSettings] = [settings.target_settings()]
    own += [settings.draft_settings() for _ in draft]
    own.append(settings.coordinator_settings(target, draft[0] if draft else None))
    keepers = [Keeper(serving.children, index, service) for index, service in enumerate(own)]
    keepers += [Keeper(serving.gateways, 0, beside(settings, serving.address)) for _ in serving.gateways]
    while True:
        time.sleep(POLL_S)
        for keeper in keepers:
            keeper.look(time.monotonic())
