"""The operations that torch dispatches: on a device each is a launch, and some microseconds of the host."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Operations that launch nothing: views, memory without numbers, and the host's own tensors.
VIEWS = (
    "view _unsafe_view slice select transpose t expand unsqueeze squeeze split split_with_sizes unbind alias "
    "as_strided detach permute reshape unfold unflatten empty new_empty lift_fresh resolve_conj "
    "resolve_neg"
).split()


class Dispatched(TorchDispatchMode):
    """Records the names of all operations in order; of those that launch nothing only with `has_views`."""

    def __init__(self, has_views: bool = False) -> None:
        super().__init__()
        self.names: list[str] = []
        self._has_views = has_views

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0]
        if self._has_views or name not in VIEWS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))
