"""Every fault by its name. A fault is a function with the decorator `fault`, here or in a user's plug-in; the
driver reads what is declared, and only ranks call the functions. No torch here, nor in the modules of
faults: what they damage brings its own methods (`dcpbench.faults.targets`)."""

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from dcpbench.config.groups import Expect, FaultConfig, Only, Place

Plant = TypeVar("Plant", bound=Callable[..., None])

NONE = "none"
FAULTS: dict[str, FaultConfig] = {NONE: FaultConfig(NONE)}
"""What is declared of each fault, and of the value that plants nothing."""

_MODULES = ("objects", "optimizer", "parameters", "saves")


def fault(
    *expects: Expect,
    name: str | None = None,
    at: Place = Place.restored,
    only: dict[str, Only] | None = None,
    **options: Any,
) -> Callable[[Plant], Plant]:
    """Declare a function that plants a defect, as a value of Hydra's group `fault`.

    Args:
        expects: by what it has to be seen; any one of them is enough.
        name: of the fault; the function's own name if it is not given.
        at: what is damaged, which decides what the function is called with: a `Target` for what was
            `restored` and for the `live` state, a `StagedState` for what is `staged`, and for files that were
            `written` their folder and that of the first checkpoint.
        only: the values of other axes with which it can be planted.
        options: further arguments of the function. One function may stand for several faults.

    Raises:
        ValueError: the name is taken.
    """

    def declare(plant: Plant) -> Plant:
        target = f"{plant.__module__}.{plant.__qualname__}"
        spec = FaultConfig(name or plant.__name__, target, at, list(expects), only or {}, options)
        if FAULTS.setdefault(spec.name, spec) != spec:
            raise ValueError(f"fault {spec.name}: declared twice")
        return plant

    return declare


def load_faults() -> dict[str, FaultConfig]:
    """dcpbench's own faults, and those of plug-ins that have been loaded, by name in alphabetical order."""
    for module in _MODULES:
        importlib.import_module(f"dcpbench.faults.{module}")
    return dict(sorted(FAULTS.items()))


def listed(at: str | None = None) -> str:
    """The names of the faults that any scenario can have, or of those that are planted at one place: a list
    for a sweep, which an experiment writes as `${faults:}` or `${faults:restored}`."""
    names = [
        name
        for name, spec in load_faults().items()
        if spec.target and "scenario" not in spec.only and at in (None, spec.at.value)
    ]
    return ",".join(names)
