"""The states of the global random generators, and the calls that keep or restore one."""

from __future__ import annotations

import array
import sys
import zlib
from typing import Any, Callable

from .log import Log, replace

CALLS = {
    "torch.random": ("torch", "get_rng_state", "set_rng_state"),
    "torch.cuda.random": ("CUDA", "get_rng_state", "set_rng_state"),
    "random": ("Python", "getstate", "setstate"),
    "numpy.random": ("NumPy", "get_state", "set_state"),
}
"""By module, the name of its generator, and the functions that return and set its state."""
_getters: dict[str, Callable[..., Any]] = {}
"""The functions that return a state and are not recorded, by the name of the generator."""


def wrap(module: Any, log: Log) -> None:
    """Replace the functions of a module by ones that record the state that is kept after a step, and the one
    that is set before the first."""
    name, get, set_state = CALLS[module.__name__]
    _getters[name] = getattr(module, get)
    for function in (get, set_state):

        def seen(*_: Any, keeps: bool = function == get, **__: Any) -> None:
            if keeps == bool(log.steps) and not log.is_in_backward:  # in which checkpoint() sets it
                log.write("generator", name=name, keeps=keeps, digest=states().get(name))

        replace(module, function, log.wrapped(getattr(module, function), after=seen, unless=_is_early))


def states() -> dict[str, Any]:
    """Return digests of the states of torch, its devices, Python and NumPy, by name."""
    import torch

    from .digests import digests

    known = {"torch": torch.random.default_generator.get_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        known["CUDA"] = torch.cuda.default_generators[torch.cuda.current_device()].get_state()
    named = digests(known)
    if get := _getters.get("Python"):
        _, keys, gauss = get()
        named["Python"] = zlib.crc32(array.array("L", keys), zlib.crc32(repr(gauss).encode()))
    if get := _getters.get("NumPy"):
        _, keys, *place = get()
        named["NumPy"] = zlib.crc32(keys, zlib.crc32(repr(place).encode()))
    return named


def _is_early() -> bool:
    """Tell whether torch is not imported yet, or a compiler runs the script's code."""
    if "torch.optim" not in sys.modules:
        return True
    from .digests import is_traced

    return is_traced()
