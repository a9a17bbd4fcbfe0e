"""The gateway process: its start, its end."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable

from specdec.errors import ConfigError
from specdec.gateway.app import Gateway
from specdec.gateway.door import HttpPort, listen
from specdec.gateway.keys import Keys
from specdec.gateway.metrics import GatewayMetrics
from specdec.gateway.prompts import Prompts, model_folder
from specdec.gateway.stream import Coordinators
from specdec.gateway_settings import GatewaySettings
from specdec.process_watch import ProcessWatch
from specdec.rpc.ports import bracketed, check_port
from specdec.rpc.process import set_startup_objects_aside, start_workers, until_stop_requested
from specdec.settings import is_loopback
from specdec.telemetry.logs import configure_logs, get_logger

SWITCH_INTERVAL_S = 0.0005  # a long prompt in a thread must not keep the streams waiting
PARTING_S = 1.0  # for the error events of streams that the stop ends


async def run(settings: GatewaySettings, on_ready: Callable[[str], None]) -> None:
    """Serves until a stop is requested; `on_ready` receives HOST:PORT once a coordinator takes requests. Raises
    SpecdecError when it cannot start, and Mismatch for a coordinator whose target has another tokenizer."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    start_workers(asyncio.get_running_loop())
    configure_logs(settings.log_level, "gateway")
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # it warns of every client that speaks no HTTP
    keys = None if settings.api_keys_file is None else Keys(settings.api_keys_file)
    prompts = Prompts(model_folder(settings.model))
    check_port(settings.host, settings.port)
    metrics = GatewayMetrics()
    coordinators = Coordinators(settings, prompts.fingerprint, metrics)
    gateway = Gateway(settings, prompts, coordinators, metrics)
    gateway.page.open(settings.metrics_address)
    files = (None if file is None else str(file) for file in (settings.http_ssl_certfile, settings.http_ssl_keyfile))
    port = HttpPort(gateway.application(keys, is_loopback(settings.host)), settings.connection_count_max, *files)
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        raise ConfigError(f"cannot listen on port {settings.port} of {settings.host}: {error.strerror}") from error
    address = f"{bracketed(settings.host)}:{listener.getsockname()[1]}"
    await port.start(listener)
    set_startup_objects_aside()
    tasks = [
        asyncio.create_task(own) for own in (announce(gateway, coordinators, address, on_ready), metrics.measure_lag())
    ]
    stopping = asyncio.create_task(until_stop_requested())
    with ProcessWatch(asyncio.get_running_loop()):
        try:
            await asyncio.wait((tasks[0], stopping), return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
            await stopping
        finally:
            stopping.cancel()
            gateway.is_draining, metrics.is_serving = True, False
            if not await port.drain(settings.drain_grace_s):
                gateway.stop()
                await port.drain(PARTING_S)
            port.abort()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await coordinators.close()
            gateway.page.close()


async def announce(gateway: Gateway, coordinators: Coordinators, address: str, on_ready: Callable[[str], None]) -> None:
    """Says that the gateway serves, once a coordinator takes requests."""
    await coordinators.until_usable()
    gateway.metrics.is_serving = True
    get_logger().info("serving", address=address, model=gateway.model, process=os.getpid())
    on_ready(address)
