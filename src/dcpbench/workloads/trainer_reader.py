"""Read what a user's trainer has: its optimizers, and its attributes."""

import dataclasses
import functools
import random
import types
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn

from dcpbench.verify.snapshot import (
    Unreadable,
    named_parameters,
    persistent_tensors,
)
from dcpbench.workloads.attributes import Attributes, When
from dcpbench.workloads.optimizers import Optimizers
from dcpbench.workloads.unsaved_values import is_users

_PLAIN = (bool, int, float, str)
_TEXTS = (complex, bytearray, range, slice, Enum)
"""Values that are compared by their texts, as are those of `_MODULES_OF_TEXTS`."""
_MODULES_OF_TEXTS = ("datetime", "pathlib", "decimal", "fractions", "uuid")
_OF_OPTIMIZERS = ("state", "param_groups", "defaults", "step", "_opt_called")
"""Attributes of an optimizer that `optim_equal` compares, or that a scheduler sets."""
_MOST, _DEEPEST = 10_000, 50
"""How many objects are read at most, and how deep they are nested."""


def optimizers_of(trainer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a trainer."""
    several = getattr(trainer, "optimizers", None)
    return list(several) if several else [trainer.optimizer]


def optimizer_of(trainer: Any) -> torch.optim.Optimizer:
    """Return the optimizer of a trainer whose state is judged, several or none as one: `not_saved` can name
    each by an attribute, or all."""
    left_out = set[int]()
    for name in {*getattr(trainer, "not_saved", ())}:
        default = optimizers_of(trainer) if name in ("optimizer", "optimizers") else None
        held = getattr(trainer, name, default)
        left_out |= {*map(id, held)} if isinstance(held, list | tuple) else {id(held)}
    several = [one for one in optimizers_of(trainer) if id(one) not in left_out]
    return several[0] if len(several) == 1 else Optimizers(several)


def attributes_of(trainer: Any, optimizers: Iterable[torch.optim.Optimizer]) -> Attributes:
    """Read the attributes of a trainer, and of these optimizers. A plain value of its class counts until the
    trainer has its own."""
    reader = _Reader(trainer)
    of_classes = {
        name: value
        for kind in reversed(type(trainer).__mro__)
        for name, value in vars(kind).items()
        if not name.startswith("__") and (value is None or type(value) in _PLAIN)
    }
    own = of_classes | getattr(trainer, "__dict__", {})
    for name, value in own.items():
        reader.read(value, name)
    for name, value in reader.attributes_of(trainer).items():
        if name not in own:
            reader.read(value, name, When.loaded)
    for number, one in enumerate(optimizers):
        reader.read_attributes(one, "optimizer" if not number else f"optimizer{number}")
    return reader.found


class _Reader:
    """Reads the attributes of a trainer, each object once, without those that `not_saved` names."""

    def __init__(self, trainer: Any) -> None:
        self.found = Attributes()
        model, optimizers = trainer.model, optimizers_of(trainer)
        self._left_out = {"model", "optimizer", "optimizers", *getattr(trainer, "not_saved", ())}
        self._trainer: type = type(trainer)
        self._package = _package(self._trainer)
        self._tensors = {id(tensor) for tensor in persistent_tensors(model).values()}
        self._read: dict[int, Any] = {id(one): one for one in (trainer, *model.modules(), *optimizers)}
        self._keys = {id(one): name for name, one in named_parameters(model).items()}
        self._within: list[int] = []

    def read(self, value: Any, name: str, when: When | None = None) -> None:
        """Read an attribute; `when` None means that it is compared always."""
        if name in self._left_out or id(value) in self._read or id(value) in self._within:
            return
        if isinstance(value, np.generic):
            value, when = value.item(), when or When.loaded
        if value is None or type(value) in _PLAIN:
            self._keep(value, name, when)
        elif isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                self._keep(value, name, when)
        elif len(self._within) < _DEEPEST:
            self._within.append(id(value))
            self._read_parts(value, name, when)
            self._within.pop()

    def _keep(self, value: Any, name: str, when: When | None) -> None:
        if when is None:
            self.found.held[name] = value
        elif name not in self.found.held:
            self.found.changing[name], self.found.when[name] = value, when

    def _read_parts(self, value: Any, name: str, when: When | None) -> None:
        kind = type(value)
        if isinstance(value, set | frozenset):
            value = _in_order(value)
        if isinstance(value, nn.Module):
            self._read_module(value, name, when)
        elif (parts := _parts(value)) is not None:
            for number, (key, one) in enumerate(parts):
                self.read(one, f"{name}.{self._key(number, key)}", when)
            if self._is_own(kind) and not dataclasses.is_dataclass(value):
                self.read_attributes(value, name)
        elif isinstance(value, np.ndarray):
            self._read_array(value, name, when)
        elif _is_collection(value):
            items = [one.item() if isinstance(one, np.generic) else one for one in value]
            plain = all(one is other for one, other in zip(value, items, strict=True))
            text = repr(value) if plain else f"{kind.__name__}: {items}"
            self._keep(text, name, when if plain else when or When.loaded)
        elif isinstance(value, _TEXTS) or _package(kind) in _MODULES_OF_TEXTS:
            always = _package(kind) in _MODULES_OF_TEXTS[:2]
            self._keep(repr(value), name, when if always else when or When.loaded)
        else:
            self._keep(Unreadable(kind.__name__), name, when)
            self._read_object(value, name, when)

    def _key(self, number: int, key: Any) -> Any:
        """Return the name of a key, also of a parameter or its `id`."""
        known = self._keys.get(key if type(key) is int else id(key))
        return known or (number if isinstance(key, torch.Tensor) else key)

    def _read_module(self, module: nn.Module, name: str, when: When | None) -> None:
        """Read a module that is not the model: its state, and its modes, which a step can set."""
        for key, one in persistent_tensors(module).items():
            self.read(one, f"{name}.{key}", when)
        for key, part in module.named_modules():
            if id(part) not in self._read:
                self._keep(part.training, f"{name}.{key}.training".replace("..", "."), When.stepped)

    def _read_array(self, array: Any, name: str, when: When | None) -> None:
        """Read an array as a tensor, or the elements of one that torch has no dtype for."""
        if array.dtype.hasobject:
            self.read(array.tolist(), name, when or When.loaded)
            return
        try:
            value: Any = torch.from_numpy(array.copy())
        except (TypeError, ValueError):
            value = f"{array.dtype}: {array.tolist()}"
        self._keep(value, name, when if array.dtype.kind in "biuf" else when or When.loaded)

    def _read_object(self, value: Any, name: str, when: When | None) -> None:
        """Read a function, or an object of the user's classes."""
        if isinstance(value, functools.partial):
            self.read(value.func, name, when)
            self.read({**dict(enumerate(value.args)), **value.keywords}, name, when or When.loaded)
        elif isinstance(value, types.MethodType):
            self.read(value.__self__, name, when or When.loaded)
            self.read(value.__func__, name, when or When.loaded)
        elif self._is_gone_into(value):
            if len(self._read) < _MOST:
                self.read_attributes(value, name, when or When.loaded)
        elif (
            when is None and not isinstance(value, torch.dtype | torch.device | type) and not callable(value)
        ):
            self.found.unreadable[name] = type(value).__name__

    def read_attributes(self, value: Any, name: str, when: When = When.stepped) -> None:
        """Read the attributes of an object, a class or a function, once."""
        self._read[id(value)] = value
        for key, one in self.attributes_of(value).items():
            self.read(one, f"{name}.{key}", when)

    def attributes_of(self, value: Any) -> dict[str, Any]:
        """Return the attributes of an object, those of its class too; the variables that a function keeps."""
        if isinstance(value, types.FunctionType):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            variables = {key: one.cell_contents for key, one in cells if key != "__class__" and _is_set(one)}
            return {**variables, **vars(value)} if self._is_own(value) else {}
        of_class = value.__mro__ if isinstance(value, type) else type(value).__mro__
        found: dict[str, Any] = {}
        for kind in filter(self._is_own, reversed(of_class)):
            for key, one in vars(kind).items():
                if isinstance(one, types.MemberDescriptorType):
                    found |= {key: getattr(value, key)} if hasattr(value, key) else {}
                elif _of_class(key, function := getattr(one, "__func__", one)):
                    found[key] = function
        if not isinstance(value, type):
            found |= getattr(value, "__dict__", {})
        of_torch = isinstance(value, torch.optim.Optimizer)
        return {key: one for key, one in found.items() if not of_torch or key not in _OF_OPTIMIZERS}

    def _is_own(self, kind: Any) -> bool:
        """Return whether a class or a function is the user's."""
        return _package(kind) == self._package or is_users(str(kind.__module__))

    def _is_gone_into(self, value: Any) -> bool:
        if isinstance(value, Thread | BaseProcess | self._trainer):  # a class may list all of them
            return False
        of_any = types.FunctionType | types.SimpleNamespace | Namespace
        return isinstance(value, of_any) or self._is_own(value if isinstance(value, type) else type(value))


def _package(kind: Any) -> str:
    return str(kind.__module__).partition(".")[0]


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - which raises
    except ValueError:
        return False
    return True


def _of_class(name: str, value: Any) -> bool:
    """Return whether an entry of a class has a state: a value, or a function that keeps variables."""
    if isinstance(value, types.FunctionType):
        return bool(vars(value) or value.__closure__)
    return not name.startswith("__") and not hasattr(type(value), "__get__")


def _parts(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return the parts of a value with their names; None for a value without parts."""
    if isinstance(value, Mapping):
        return iter(value.items())
    if isinstance(value, torch.Generator):
        return iter({"state": value.get_state()}.items())
    if isinstance(value, random.Random):
        return iter({"state": value.getstate()}.items())
    if isinstance(value, np.random.Generator):
        return iter({**value.bit_generator.state}.items())
    if isinstance(value, np.random.RandomState):
        return iter({**value.get_state(legacy=False)}.items())
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        return iter({**value.state_dict()}.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return iter({**fields, **getattr(value, "__dict__", {})}.items())
    if _is_collection(value) and not all(
        one is None or type(one) in _PLAIN or isinstance(one, np.generic) for one in value
    ):
        return iter(enumerate(value))
    return None


def _in_order(value: Iterable[Any]) -> list[Any]:
    """Return the elements of a set by their texts: the order in a set depends on how it grew, and on the hash
    seed of the process."""
    in_order = [_in_order(one) if isinstance(one, set | frozenset) else one for one in value]
    return ["a set", *sorted(in_order, key=repr)]


def _is_collection(value: Any) -> TypeGuard[Iterable[Any]]:
    return isinstance(value, list | tuple | deque | bytes)
