"""The tensors of a script's models by their names: those below the modules that it calls."""

from __future__ import annotations

import gc
import weakref
from typing import Any

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module.")


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
        if any(reference() is module for reference in self._roots):
            return
        unnamed = [(name, value) for name, value in module.named_parameters() if not self._known(value)]
        if not unnamed:
            return
        self._roots.append(weakref.ref(module))
        taken = {name for _, name in self._names.values()}
        for name, value in unnamed:
            name = _clean(name)
            if name in taken:
                name = f"{type(module).__name__}{len(self._roots)}.{name}"
            self._names[id(value)] = weakref.ref(value), name

    def of(self, parameter: Any, otherwise: str) -> str:
        """Return the name of a parameter of an optimizer."""
        if not self._known(parameter):
            owner = _owner(parameter)
            if owner is not None:
                self.add(owner)
        if not self._known(parameter):
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
                name = _clean(name)
                buffers[name if name not in buffers else f"{type(root).__name__}.{name}"] = value
        return [*parameters.items()], [*buffers.items()]

    def mode(self, module: Any) -> tuple[str, int]:
        """Return a name of a module that is called, and how many of its modules are in training mode."""
        places = [place for place, root in enumerate(self.roots) if root is module]
        return f"{type(module).__name__} {places[:1]}", sum(one.training for one in module.modules())

    def _known(self, value: Any) -> bool:
        return id(value) in self._names and self._names[id(value)][0]() is value


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name[len("module.") :] if name.startswith("module.") else name


def _owner(parameter: Any) -> Any:
    """Return the largest module that has a parameter: one whose methods the script calls, not itself."""
    import torch

    found, size = None, 0
    for thing in gc.get_objects():
        # `isinstance` would ask proxies for their class, which wakes some of them.
        if issubclass(type(thing), torch.nn.Module):
            try:
                modules = sum(1 for _ in thing.modules())
                if modules > size and any(value is parameter for value in thing.parameters()):
                    found, size = thing, modules
            except Exception:  # noqa: BLE001, S112 - a module that is not complete yet
                continue
    return found
