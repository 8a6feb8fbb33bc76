"""Registry of all faults by name. A fault is a function with the decorator `fault`, here or in a user's
plug-in. The driver reads the declarations, and only ranks call the functions. Neither this module nor the
modules of faults import torch: the object they damage has all methods (`dcpbench.plugins.faults.targets`)."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from dcpbench.config.groups import Expect, FaultConfig, Only, Place
from dcpbench.core.plugins import declared_values

Inject = Callable[..., None]

FAULTS: dict[str, FaultConfig] = {}
"""The declaration of each fault."""


def fault(
    *expects: Expect,
    name: str | None = None,
    at: Place = Place.restored,
    only: dict[str, Only] | None = None,
    on_one_rank: bool = False,
    rank: int = -2,
    saves: int = 1,
    **options: Any,
) -> Callable[[Inject], Inject]:
    """Declare a function that damages a `Target` or a `WrongTraining` as a value of Hydra's group `fault`.

    Args:
        expects: ways to detect it; one of them is enough.
        name: of the fault; the name of the function by default.
        at: the damaged state.
        only: the values of other axes with which it can be injected.
        on_one_rank: inject it on a single rank.
        rank: that rank, counted from the last one if negative.
        saves: how many checkpoints the cell has to write.
        options: further arguments of the function. One function can implement several faults.

    Raises:
        ValueError: the name is taken.
    """

    def declare(inject: Inject) -> Inject:
        target = f"{inject.__module__}.{inject.__qualname__}"
        spec = FaultConfig(
            name or inject.__name__, target, at, on_one_rank, rank, saves, list(expects), only or {}, options
        )
        if FAULTS.setdefault(spec.name, spec) != spec:
            raise ValueError(f"fault {spec.name}: declared twice")
        return inject

    return declare


on_one_rank = partial(fault, on_one_rank=True)
staged = partial(fault, at=Place.staged)
live = partial(fault, Expect("save_harmless"), at=Place.live)
written = partial(fault, at=Place.written)


def faults() -> dict[str, FaultConfig]:
    """Return the faults that were declared so far, sorted by name. A plug-in with a module of faults, which
    imports this function, has the values `{"fault": "mine.faults:faults"}`."""
    return dict(sorted(FAULTS.items()))


def load_faults() -> dict[str, FaultConfig]:
    """Return the faults of this plug-in, sorted by name."""
    for module in ("behavior", "saves", "tensors", "training", "values"):
        importlib.import_module(f"dcpbench.plugins.faults.{module}")
    return faults()


def listed(at: str | None = None) -> str:
    """Return the names of the faults that fit any scenario, storage, component and `load_into` with
    `verify=standard`; with `at` only those injected at that place. An experiment writes `${faults:}` or
    `${faults:restored}`. Faults of training are listed only with `at=training`."""
    return ",".join(
        name
        for name, spec in declared_values()["fault"].items()
        if not _is_special(spec)
        if (spec.at.value == at if at else spec.at is not Place.training)
    )


def _is_special(spec: FaultConfig) -> bool:
    """Return whether a fault needs a certain scenario, storage, component, `verify` or `load_into`."""
    into = spec.only.get("load_into")
    limited = {"scenario", "verify", "storage", "component"} & spec.only.keys()
    return bool(limited) or (into is not None and "default" not in into.values)
