"""The operations that torch dispatches: on a device each is a launch, and some microseconds of the host."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = frozenset(
    "view _unsafe_view slice select transpose t expand unsqueeze squeeze split split_with_sizes unbind alias as_strided "
    "detach permute reshape unfold unflatten".split()
)


class Dispatched(TorchDispatchMode):
    """Records the names of all operations in order, but for those that make a view."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0]
        if name not in VIEWS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))
