"""The layers of a model, which parallelisms shard, recompute or compile separately."""

import fnmatch
from collections import Counter
from collections.abc import Sequence

from torch import nn

from dcpbench.verify.snapshot import plain_fqn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)

Layer = tuple[nn.Module, str, nn.Module]
"""The module that has a layer, its name there, and the layer."""


def layers(model: nn.Module, patterns: Sequence[str] = ()) -> list[Layer]:
    """Return the layers of a model, wrappers included.

    Args:
        patterns: of their names in the plain model, in which `*` stands for one part: `model.layers.*`. By
            default layers are the children of the model, or theirs if they are containers.

    Raises:
        ValueError: a pattern matches nothing or a list of modules, or a layer is inside another.
    """
    if patterns:
        found = ((name.rpartition("."), model.get_submodule(name)) for name in _named(model, patterns))
        return [(model.get_submodule(above), last, layer) for (above, _, last), layer in found]
    inner: list[Layer] = []
    for name, child in model.named_children():
        inner += layers(child) if isinstance(child, _CONTAINERS) else [(model, name, child)]
    return inner


def layers_of_their_own(model: nn.Module, patterns: Sequence[str] = ()) -> list[nn.Module]:
    """Return the layers with parameters that no other layer shares; `patterns` are those of `layers`."""
    own = {layer: list(layer.parameters()) for _, _, layer in layers(model, patterns)}
    held = Counter(id(value) for values in own.values() for value in values)
    return [one for one, values in own.items() if values and all(held[id(value)] == 1 for value in values)]


def _named(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    names: dict[str, str] = {}
    for name, _ in model.named_modules():
        # The outermost of a layer's wrappers comes first.
        names.setdefault(plain_fqn(model, f"{name}.").rstrip("."), name)
    found: list[str] = []
    for pattern in patterns:
        matching = [name for name in names if name and _matches(name, pattern)]
        if not matching:
            raise ValueError(f"layers: the model has no module {pattern}")
        found += (name for name in matching if name not in found)
    for name in found:
        module = model.get_submodule(names[name])
        if isinstance(module, _WITHOUT_FORWARD):
            raise ValueError(f"layers: {name} is a {type(module).__name__}; pass {name}.*")
        if outer := next((one for one in found if name.startswith(f"{one}.")), None):
            raise ValueError(f"layers: {name} is inside {outer}; pass only one of them")
    return [names[name] for name in found]


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
