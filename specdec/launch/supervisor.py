"""Restarts of the services that `specdec serve` started: each comes back on its port, where the others reconnect.

The wait grows with each restart, and a service that ends again and again is given up.
"""

from __future__ import annotations

import time

from specdec.errors import ConfigError, ReplicaUnavailable
from specdec.gateway_settings import GatewaySettings
from specdec.launch.children import Child, start
from specdec.settings import ServiceSettings, split_address
from specdec.streams import warn

RESTART_WAIT_S, RESTART_WAIT_S_MAX = 1.0, 60.0  # before a lost service is restarted: doubled each time
RESTART_COUNT_MAX = 6  # in a row: about a minute of waits, for a temporary lack of memory
STEADY_S = 300.0  # a service that ran for so long may be restarted as often again

EFFECTS = {  # of the loss of a service, while it is away
    "target": "texts under way wait for it",
    "draft": "texts go on without its guesses",
    "coordinator": "texts under way are lost, and their clients may resume them",
    "gateway": "HTTP requests under way are lost",
}


class Keeper:
    """Keeps one service of `children` running; the list always holds the current process, at the same index.

    Make it once the service is ready; its settings give the command line of a restart. Without the draft the others go
    on; any other service that is given up ends all.
    """

    def __init__(self, children: list[Child], index: int, settings: ServiceSettings | GatewaySettings) -> None:
        self._children = children
        self._index = index
        self._settings = settings.model_copy(update={"port": split_address(self._child.address)[1]})
        self._restart_count = 0
        self._due_s: float | None = None  # time of the restart; None: it runs, or was given up
        self._started_s = time.monotonic()
        self._is_given_up = False

    @property
    def _child(self) -> Child:
        return self._children[self._index]

    def look(self, now_s: float) -> None:
        """Checks and restarts the service. Call it often, in the thread that started the children; it does not block.

        Raises ReplicaUnavailable when it gives up another service than the draft.
        """
        if self._is_given_up:
            return
        if self._due_s is not None:
            if now_s >= self._due_s:
                self._start(now_s)
        elif not self._child.is_running:
            self._plan(now_s)
        elif not self._child.address and self._hears():
            warn(f"the {self._child.command} service is back")

    def _hears(self) -> bool:
        try:
            return self._child.check_ready(0.0)
        except ConfigError as error:  # it ended; the next check detects that too
            warn(str(error))
            return False

    def _plan(self, now_s: float) -> None:
        name, code = self._child.command, self._child.process.returncode
        if now_s - self._started_s >= STEADY_S:
            self._restart_count = 0
        if self._restart_count >= RESTART_COUNT_MAX:
            self._give_up(
                f"the {name} service ended with code {code}; it was started again {self._restart_count} times and is "
                "given up"
            )
            return
        wait_s = min(RESTART_WAIT_S * 2**self._restart_count, RESTART_WAIT_S_MAX)
        warn(f"the {name} service ended with code {code}; {EFFECTS[name]}; it is started again in {wait_s:g} s")
        self._due_s = now_s + wait_s

    def _give_up(self, sentence: str) -> None:
        self._is_given_up = True
        if self._child.command != "draft":
            raise ReplicaUnavailable(f"{sentence}, and the other services with it; the lines before say why it ended")
        warn(sentence)

    def _start(self, now_s: float) -> None:
        self._child.stop(0.0)
        self._due_s, self._started_s = None, now_s
        self._restart_count += 1
        self._children[self._index] = start(self._child.command, self._settings)
