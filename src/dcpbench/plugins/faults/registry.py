"""Every fault by its name. A fault is a function with the decorator `fault`, here or in a user's plug-in; the
driver reads what is declared, and only ranks call the functions. No torch here, nor in the modules of
faults: what they damage brings its own methods (`dcpbench.plugins.faults.targets`)."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from dcpbench.config.groups import Expect, FaultConfig, Only, Place
from dcpbench.core.plugins import plugins

Plant = Callable[..., None]

FAULTS: dict[str, FaultConfig] = {}
"""What is declared of each fault."""


def fault(
    *expects: Expect,
    name: str | None = None,
    at: Place = Place.restored,
    only: dict[str, Only] | None = None,
    on_one_rank: bool = False,
    rank: int = -2,
    saves: int = 1,
    **options: Any,
) -> Callable[[Plant], Plant]:
    """Declare a function that plants a defect in a `Target`, or in a `WrongTraining`, as a value of Hydra's
    group `fault`.

    Args:
        expects: by what it has to be seen; any one of them is enough.
        name: of the fault; the function's own name if it is not given.
        at: what is damaged.
        only: the values of other axes with which it can be planted.
        on_one_rank: whether it is planted on one rank alone.
        rank: which one that is, counted from the last one if negative.
        saves: how many checkpoints the cell has to write.
        options: further arguments of the function. One function may stand for several faults.

    Raises:
        ValueError: the name is taken.
    """

    def declare(plant: Plant) -> Plant:
        target = f"{plant.__module__}.{plant.__qualname__}"
        spec = FaultConfig(
            name or plant.__name__, target, at, on_one_rank, rank, saves, list(expects), only or {}, options
        )
        if FAULTS.setdefault(spec.name, spec) != spec:
            raise ValueError(f"fault {spec.name}: declared twice")
        return plant

    return declare


on_one_rank = partial(fault, on_one_rank=True)
staged = partial(fault, at=Place.staged)
live = partial(fault, Expect("save_harmless"), at=Place.live)
written = partial(fault, at=Place.written)


def load_faults() -> dict[str, FaultConfig]:
    """The faults of all plug-ins, by name in alphabetical order."""
    for module in (module for plugin in plugins() for module in plugin.faults):
        importlib.import_module(module)
    return dict(sorted(FAULTS.items()))


def listed(at: str | None = None) -> str:
    """The names of the faults that any scenario, storage, component and `load_into` can have with
    `verify=standard`, or of those of them that are planted at one place: a list for a sweep, which an
    experiment writes as `${faults:}` or `${faults:restored}`. Those of training are listed by their place
    alone."""
    return ",".join(
        name
        for name, spec in load_faults().items()
        if not _is_special(spec)
        if (spec.at.value == at if at else spec.at is not Place.training)
    )


def _is_special(spec: FaultConfig) -> bool:
    """Whether it is one of a scenario, a storage, a component, `verify=deep`, or of what a checkpoint is
    loaded into."""
    into = spec.only.get("load_into")
    limited = {"scenario", "verify", "storage", "component"} & spec.only.keys()
    return bool(limited) or (into is not None and "default" not in into.values)
