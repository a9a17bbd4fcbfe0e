"""The table of docs/architecture.md: what each package may import, from the bottom to the top."""

from __future__ import annotations

from dataclasses import dataclass

from tests.hygiene.sources import LINKED

TOOLS = ("bench", "models", "examples")
PROJECT = ("specdec", *LINKED, *TOOLS, "tests")
MODEL_LIBRARIES = ("torch", "transformers", "safetensors", "numpy")
NETWORK_LIBRARIES = ("grpc", "grpc_health", "grpc_reflection", "grpc_status")
CLOCKS_AND_CHANCE = ("asyncio", "threading", "time", "datetime", "random", "secrets", "uuid", "os", "socket")
# Plain values and pure functions of the protocol, which every package may use; tree, session and policy are machines.
VALUE_MODULES = (
    "types",
    "items",
    "request",
    "records",
    "report",
    "limits",
    "fields",
    "noise",
    "fingerprint",
    "tree_shape",
    "heads",
    "prefix_digests",
    "grammar",
)
VALUES = tuple(f"specdec.protocol.{name}" for name in VALUE_MODULES)


@dataclass(frozen=True, slots=True)
class Imports:
    """One line of the table. `project`: the parts of the project that may be imported; `never`: outside libraries."""

    package: str
    project: tuple[str, ...]
    never: tuple[str, ...] = ()


TABLE = (
    Imports("specdec.errors", (), MODEL_LIBRARIES + NETWORK_LIBRARIES),
    Imports("specdec.folders", ("specdec.errors",), MODEL_LIBRARIES + NETWORK_LIBRARIES + ("pydantic",)),
    Imports("specdec.process_watch", (), MODEL_LIBRARIES + NETWORK_LIBRARIES + ("pydantic",)),
    Imports("specdec.terminal", (), MODEL_LIBRARIES + NETWORK_LIBRARIES + ("pydantic",)),
    Imports("specdec.streams", ("specdec.terminal",), MODEL_LIBRARIES + NETWORK_LIBRARIES + ("pydantic",)),
    Imports("specdec.tokenizer_file", ("specdec.errors",), MODEL_LIBRARIES + NETWORK_LIBRARIES + ("pydantic",)),
    Imports(
        "specdec.protocol",
        ("specdec.errors",),
        MODEL_LIBRARIES + NETWORK_LIBRARIES + CLOCKS_AND_CHANCE,
    ),
    Imports("specdec.settings", (), MODEL_LIBRARIES + NETWORK_LIBRARIES + ("asyncio",)),
    Imports(
        "specdec.config",
        ("specdec.errors", "specdec.folders", "specdec.settings", *VALUES),
        MODEL_LIBRARIES + NETWORK_LIBRARIES + ("asyncio",),
    ),
    Imports(
        "specdec.gateway_settings",
        ("specdec.folders", "specdec.settings", "specdec.config"),
        MODEL_LIBRARIES + NETWORK_LIBRARIES + ("asyncio",),
    ),
    Imports("specdec.step_curve", (), MODEL_LIBRARIES + NETWORK_LIBRARIES + CLOCKS_AND_CHANCE),
    Imports(
        "specdec.policy",
        (
            "specdec.errors",
            "specdec.step_curve",
            "specdec.protocol.limits",
            "specdec.protocol.types",
            "specdec.protocol.plan",
            "specdec.protocol.policy",
            "specdec.protocol.records",
        ),
        MODEL_LIBRARIES + NETWORK_LIBRARIES + CLOCKS_AND_CHANCE,
    ),
    Imports(
        "specdec.engine",
        (
            "specdec.errors",
            "specdec.terminal",
            "specdec.folders",
            "specdec.process_watch",
            "specdec.tokenizer_file",
            "specdec.protocol.limits",
            "specdec.protocol.types",
            "specdec.protocol.heads",
            "specdec.protocol.fingerprint",
            "specdec.protocol.prefix_digests",
        ),
        NETWORK_LIBRARIES + ("asyncio", "pydantic"),
    ),
    Imports(
        "specdec.decoding",
        (
            "specdec.errors",
            "specdec.protocol.heads",
            "specdec.protocol.types",
            "specdec.protocol.noise",
            "specdec.protocol.tree_shape",
            "specdec.engine.cpu.kernels",
            "specdec.engine.cpu.sampling",
            "specdec.engine.cuda.kernels",
            "specdec.engine.readback",
        ),
        NETWORK_LIBRARIES + ("asyncio", "transformers"),
    ),
    Imports("specdec.grammar", ("specdec.errors", *VALUES), MODEL_LIBRARIES + NETWORK_LIBRARIES + ("asyncio",)),
    Imports(
        "specdec.telemetry",
        ("specdec.__version__", "specdec.errors", "specdec.terminal", "specdec.config", *VALUES),
        MODEL_LIBRARIES,
    ),
    Imports(
        "specdec.rpc",
        ("specdec.__version__", "specdec.errors", "specdec.config", "specdec.telemetry", "specdec.v1", *VALUES),
        MODEL_LIBRARIES,
    ),
    Imports(
        "specdec.client",
        ("specdec.errors", "specdec.settings", "specdec.rpc.client", "specdec.v1", *VALUES),
        MODEL_LIBRARIES + NETWORK_LIBRARIES,
    ),
    Imports(
        "specdec.chat",
        ("specdec.errors", "specdec.folders", "specdec.tokenizer_file"),
        MODEL_LIBRARIES + NETWORK_LIBRARIES,
    ),
    Imports(
        "specdec.traces",
        ("specdec.errors",),
        MODEL_LIBRARIES + NETWORK_LIBRARIES,
    ),
    Imports(
        "specdec.gateway",
        (
            "specdec.__version__",
            "specdec.process_watch",
            "specdec.errors",
            "specdec.folders",
            "specdec.settings",
            "specdec.config",
            "specdec.gateway_settings",
            "specdec.tokenizer_file",
            "specdec.telemetry",
            "specdec.rpc",
            "specdec.client",
            "specdec.chat",
            "specdec.grammar.texts",
            "specdec.v1",
            *VALUES,
        ),
        MODEL_LIBRARIES,
    ),
    Imports(
        "specdec.launch",
        (
            "specdec.errors",
            "specdec.gateway_settings",
            "specdec.folders",
            "specdec.terminal",
            "specdec.streams",
            "specdec.settings",
            "specdec.config",
            "specdec.engine.parallel.rank_config",
            "specdec.engine.loading.model_folder",
            "specdec.rpc",
            "specdec.v1",
            *VALUES,
        ),
        MODEL_LIBRARIES + NETWORK_LIBRARIES,
    ),
    Imports(
        "specdec.replica",
        (
            "specdec.process_watch",
            "specdec.errors",
            "specdec.config",
            "specdec.folders",
            "specdec.engine",
            "specdec.grammar",
            "specdec.rpc",
            "specdec.telemetry",
            "specdec.v1",
            *VALUES,
        ),
        ("transformers",),
    ),
    *(
        Imports(
            service,
            (
                "specdec.errors",
                "specdec.config",
                "specdec.decoding",
                "specdec.engine",
                "specdec.grammar",
                "specdec.replica",
                "specdec.rpc",
                "specdec.telemetry",
                "specdec.v1",
                "specdec.protocol.tree",
                "specdec.protocol.growth",
                "specdec.protocol.calibration",
                "specdec.step_curve",
                *VALUES,
                *more,
            ),
            ("transformers",),
        )
        for service, more in (
            ("specdec.draft_service", ()),
            ("specdec.target_service", ("specdec.folders", "specdec.protocol.rejection")),
        )
    ),
    Imports(
        "specdec.coordinator",
        (
            "specdec.process_watch",
            "specdec.errors",
            "specdec.config",
            "specdec.folders",
            "specdec.grammar",
            "specdec.policy",
            "specdec.protocol",
            "specdec.rpc",
            "specdec.telemetry",
            "specdec.v1",
        ),
        MODEL_LIBRARIES,
    ),
    Imports(
        "specdec.distill",
        (
            "specdec.errors",
            "specdec.folders",
            "specdec.terminal",
            "specdec.settings",
            "specdec.tokenizer_file",
            "specdec.chat",
            "specdec.decoding",
            "specdec.engine",
            *VALUES,
        ),
        NETWORK_LIBRARIES + ("asyncio",),
    ),
    Imports(
        "specdec.advise",
        (
            "specdec.errors",
            "specdec.folders",
            "specdec.terminal",
            "specdec.settings",
            "specdec.config",
            "specdec.client",
            "specdec.launch.serving",
            "specdec.decoding",
            "specdec.distill",
            "specdec.engine",
            "specdec.step_curve",
            *VALUES,
        ),
        NETWORK_LIBRARIES,
    ),
    Imports(
        "specdec.cli",
        (
            "specdec.__version__",
            "specdec.errors",
            "specdec.terminal",
            "specdec.streams",
            "specdec.launch",
            "specdec.client",
            "specdec.rpc.process",
            "specdec.traces",
            "specdec.config",
            "specdec.folders",
            "specdec.telemetry",
            "specdec.settings",
            "specdec.chat",
            "specdec.engine.loading.model_folder",
            "specdec.coordinator.service",
            "specdec.draft_service.service",
            "specdec.target_service.service",
            "specdec.gateway.service",
            "specdec.gateway_settings",
            "specdec.gateway.keys",
            *VALUES,
        ),
        MODEL_LIBRARIES,
    ),
    Imports(
        "specdec.ray",
        (
            "specdec.__version__",
            "specdec.errors",
            "specdec.terminal",
            "specdec.settings",
            "specdec.config",
            "specdec.gateway_settings",
            "specdec.rpc.client",
            "specdec.cli.options",
            "specdec.launch.children",
            "specdec.streams",
        ),
        MODEL_LIBRARIES,
    ),
    Imports(
        "specdec.cli.main",
        (
            "specdec.__version__",
            "specdec.errors",
            "specdec.terminal",
            "specdec.streams",
            "specdec.config",
            "specdec.launch.child_events",
            "specdec.cli",
            "specdec.advise.settings",
            "specdec.distill.settings",
            "specdec.gateway_settings",
        ),
        MODEL_LIBRARIES + NETWORK_LIBRARIES,
    ),
    *(
        Imports(f"specdec.{program}.__main__", ("specdec.cli.main", "specdec.streams"), MODEL_LIBRARIES)
        for program in ("cli", "draft_service", "target_service", "coordinator", "gateway")
    ),
)
