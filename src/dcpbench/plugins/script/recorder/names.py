"""The tensors of a script's models by their names: those below the modules that it calls."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

_WRAPPERS = re.compile(
    r"_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_forward_module\.|^module\."
)


class Names:
    """The modules that are called with gradients, and the names of their parameters."""

    def __init__(self) -> None:
        self._roots: list[weakref.ref[Any]] = []
        self._names: dict[int, tuple[weakref.ref[Any], str]] = {}

    @property
    def roots(self) -> list[Any]:
        """The modules that still exist."""
        return [module for module in (reference() for reference in self._roots) if module is not None]

    def add(self, module: Any) -> None:
        """Name the parameters of a module that is called, if it has parameters without a name."""
        unnamed = [(name, value) for name, value in module.named_parameters() if not self._has(value)]
        if not unnamed:
            return
        self._roots.append(weakref.ref(module))
        taken = {name for _, name in self._names.values()}
        for name, value in unnamed:
            name = _WRAPPERS.sub("", name)
            prefix = f"{type(module).__name__}{len(self._roots)}." if name in taken else ""
            self._names[id(value)] = weakref.ref(value), prefix + name

    def of(self, parameter: Any, otherwise: str) -> str:
        """Return the name of a parameter of an optimizer."""
        if not self._has(parameter) and (owner := _owner(parameter)):
            self.add(owner)
        if not self._has(parameter):
            self._names[id(parameter)] = weakref.ref(parameter), otherwise
        return self._names[id(parameter)][1]

    def others(self, known: set[int]) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
        """Return the parameters that are not `known`, and all buffers."""
        parameters: dict[str, Any] = {}
        buffers: dict[str, Any] = {}
        for root in self.roots:
            for name, value in root.named_parameters():
                if id(value) not in known:
                    parameters.setdefault(self.of(value, name), value)
            for name, value in root.named_buffers():
                name = _WRAPPERS.sub("", name)
                buffers[name if name not in buffers else f"{type(root).__name__}.{name}"] = value
        return [*parameters.items()], [*buffers.items()]

    def mode(self, module: Any) -> tuple[str, int]:
        """Return a name of a module that is called, and how many of its modules are in training mode."""
        places = [place for place, root in enumerate(self.roots) if root is module]
        return f"{type(module).__name__} {places[:1]}", sum(inner.training for inner in module.modules())

    def _has(self, value: Any) -> bool:
        return id(value) in self._names and self._names[id(value)][0]() is value


def _owner(parameter: Any) -> Any:
    """Return the largest module that has a parameter: one whose methods the script calls, not itself."""
    import torch

    # `isinstance` would ask proxies for their class, which wakes some of them.
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
    owners = [module for module in modules if any(value is parameter for value in _parameters(module))]
    return max(owners, key=lambda module: sum(1 for _ in module.modules()), default=None)


def _parameters(module: Any) -> list[Any]:
    try:
        return [*module.parameters()]
    except Exception:  # noqa: BLE001 - a module that is not complete yet
        return []
