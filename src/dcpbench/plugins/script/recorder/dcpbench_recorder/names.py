"""The tensors of a script's models by their names: those below the modules that it calls."""

from __future__ import annotations

import re
import weakref
from typing import Any

_WRAPPERS = re.compile(
    r"_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_forward_module\.|^module\."
)


class Models:
    """The modules that are called with gradients, by their numbers."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def add(self, module: Any) -> str:
        """Add a module that is called, and return its name."""
        number = self._numbers.setdefault(module, len(self._numbers))
        return f"{type(module).__name__} {number}"

    def modules(self) -> list[Any]:
        """Return these modules, and all below them."""
        return [module for model in [*self._numbers] for module in model.modules()]

    def parameters(self) -> dict[int, tuple[str, Any]]:
        """Return the name and the parameter by its id."""
        return self._named("named_parameters")

    def buffers(self) -> dict[str, Any]:
        """Return the buffers by name."""
        return dict(self._named("named_buffers").values())

    def _named(self, method: str) -> dict[int, tuple[str, Any]]:
        named: dict[int, tuple[str, Any]] = {}
        taken: set[str] = set()
        for model, number in [*self._numbers.items()]:
            for name, value in getattr(model, method)():
                if id(value) not in named:
                    name = _WRAPPERS.sub("", name)
                    name = f"{type(model).__name__}{number}.{name}" if name in taken else name
                    taken.add(name)
                    named[id(value)] = name, value
        return named
