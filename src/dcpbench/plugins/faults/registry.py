"""Registry of all faults by name. A fault is a function with the decorator `fault`, here or in a user's
plug-in. The driver reads the declarations, and only ranks call the functions. Neither this module nor the
modules of faults import torch: the object they damage has all methods (`dcpbench.plugins.faults.targets`)."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from dcpbench.config.groups import Expect, FaultConfig, InjectedAt, Only

Inject = Callable[..., None]

FAULTS: dict[str, FaultConfig] = {}
"""The declaration of each fault."""


def fault(
    *expects: Expect,
    name: str | None = None,
    at: InjectedAt = InjectedAt.restored,
    only: dict[str, Only] | None = None,
    rank: int | None = None,
    saves: int = 1,
    **options: Any,
) -> Callable[[Inject], Inject]:
    """Declare a function that damages a `Target` or a `WrongTraining` as a value of Hydra's group `fault`.

    Args:
        expects: ways to detect it; one of them is enough.
        name: of the fault; the name of the function by default.
        at: the damaged state.
        only: the values of other axes with which it can be injected.
        rank: the only rank that injects it, counted from the last one if negative; all by default.
        saves: how many checkpoints the cell has to write.
        options: further arguments of the function. One function can implement several faults.

    Raises:
        ValueError: the name is taken.
    """

    def declare(inject: Inject) -> Inject:
        target = f"{inject.__module__}.{inject.__qualname__}"
        spec = FaultConfig(
            name or inject.__name__, target, at, rank, saves, list(expects), only or {}, options
        )
        if FAULTS.setdefault(spec.name, spec) != spec:
            raise ValueError(f"fault {spec.name}: declared twice")
        return inject

    return declare


on_one_rank = partial(fault, rank=-2)
staged = partial(fault, at=InjectedAt.staged)
written = partial(fault, at=InjectedAt.written)


def faults() -> dict[str, FaultConfig]:
    """Return the faults that were declared so far, sorted by name. A plug-in with a module of faults, which
    imports this function, has the values `{"fault": "mine.faults:faults"}`."""
    return dict(sorted(FAULTS.items()))


def load_faults() -> dict[str, FaultConfig]:
    """Return the faults of this plug-in, sorted by name."""
    for module in ("behavior", "saves", "tensors", "training", "values"):
        importlib.import_module(f"dcpbench.plugins.faults.{module}")
    return faults()
