"""The random generators that training may draw from: the default ones of torch on the CPU and on the device,
of Python and of NumPy, whose states are tensors, as a checkpoint has them; and those that a model has."""

import random
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from dcpbench.compare.leaves import same_value
from dcpbench.state.snapshot import plain_fqn

OF_TORCH = ("cpu", "cuda")
ALL = (*OF_TORCH, "python", "numpy")

KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

States = dict[str, torch.Tensor]
"""The state of each generator by its name."""


def seed_generators(seed: int, device: torch.device, names: tuple[str, ...] = ALL) -> None:
    """Seed the default generators with these names. `torch.manual_seed` would seed those of all devices, and
    format a stack for each that is not in use."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    if "python" in names:
        random.seed(seed)
    if "numpy" in names:
        np.random.seed(seed % 2**32)


def states_of_generators(device: torch.device, names: tuple[str, ...] = ALL) -> States:
    """Return the states of the generators with these names that this process has."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if "python" in names:
        version, words, normal = random.getstate()
        states["python"] = _as_tensor((version, *words), normal)
    if "numpy" in names:
        state: Any = np.random.get_state(legacy=True)
        _, keys, position, has_normal, cached = state
        states["numpy"] = _as_tensor((*keys.tolist(), position), cached if has_normal else None)
    return states


def set_generators(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Set the generators that have a state here."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    if "python" in states:
        (version, *words), normal = _from_tensor(states["python"])
        random.setstate((version, tuple(words), normal))
    if "numpy" in states:
        (*keys, position), normal = _from_tensor(states["numpy"])
        np.random.set_state(
            ("MT19937", np.array(keys, np.uint32), position, int(normal is not None), normal or 0.0)
        )


def _as_tensor(words: tuple[int, ...], normal: float | None) -> torch.Tensor:
    """Return the state of a Mersenne twister as integers: its words, and the bits of a normally distributed
    number that it has in reserve, if it has one."""
    bits = 0 if normal is None else struct.unpack("q", struct.pack("d", normal))[0]
    return torch.tensor([*words, normal is not None, bits], dtype=torch.int64, device="cpu")


def _from_tensor(state: torch.Tensor) -> tuple[list[int], float | None]:
    *words, has_normal, bits = state.tolist()
    return words, struct.unpack("d", struct.pack("q", bits))[0] if has_normal else None


class RandomState:
    """The generators that a run draws from, as for dropout. Each run in a process has a separate state of the
    default ones.

    Args:
        names: of the default ones.
        not_saved: those of them that no checkpoint has.
        of_model: returns the generators that its model has, by FQN.

    Attributes:
        drawn: the names of those that steps have drawn from.
    """

    def __init__(
        self,
        seed: int,
        rank: int,
        device: torch.device,
        names: tuple[str, ...] = OF_TORCH,
        not_saved: frozenset[str] = frozenset(),
        of_model: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.key, self.not_saved, self.of_model = f"rank{rank}", not_saved, of_model
        self._device, self._names = device, names
        self.drawn: set[str] = set()
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Seed the generators of this run."""
        with self._swapped():
            seed_generators(seed, self._device, self._names)
            self.states = self._current()

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """Context manager: set the default generators to those of this run."""
        with self._swapped():
            set_generators(self.states, self._device)
            try:
                yield
            finally:
                self.states = self._current()

    @contextmanager
    def set_aside(self, seed: int) -> Iterator[None]:
        """Context manager: seed the default generators; those of this run stay as they are."""
        with self._swapped():
            seed_generators(seed, self._device, self._names)
            yield

    @contextmanager
    def noting_draws(self) -> Iterator[None]:
        """Context manager around a step: note in `drawn` which generators it draws from."""
        before = self._every()
        try:
            yield
        finally:
            after = self._every()
            self.drawn |= {name for name in before if not same_value(before[name], after.get(name))}

    @property
    def needed(self) -> frozenset[str] | None:
        """The generators that a load has to restore; None means the default ones. A step that draws from
        another one, or from one that is not saved, needs that."""
        if not self.not_saved and not self.of_model():
            return None
        return frozenset(self.drawn | (self.states.keys() - self.not_saved))

    def contents(self, names: frozenset[str] | None) -> dict[str, Any]:
        """Return the states of these generators, or of all, for comparison."""
        states = self._every().items()
        return {self.key: {name: state for name, state in states if names is None or name in names}}

    def copy_from(self, source: "RandomState") -> None:
        """Bring all into the state of the same generators of another run."""
        self.states, theirs = dict(source.states), source.of_model()
        for name, generator in self.of_model().items():
            if name in theirs:
                set_generator(generator, state_of_generator(theirs[name]))

    def _every(self) -> dict[str, Any]:
        of_model = {
            f"model.{name}": state_of_generator(generator) for name, generator in self.of_model().items()
        }
        return {**of_model, **self.states}

    def state_dict(self) -> dict[str, Any]:
        return {self.key: {name: state for name, state in self.states.items() if name not in self.not_saved}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.states = {**self.states, **state_dict[self.key]}

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        before = self._current()
        try:
            yield
        finally:
            set_generators(before, self._device)

    def _current(self) -> States:
        return states_of_generators(self._device, self._names)


def generators_of(model: nn.Module) -> dict[str, Any]:
    """Return the generators that are attributes of modules, or in their lists and dictionaries, by FQN and
    attribute."""
    return {
        f"{plain_fqn(model, prefix)}.{name}".lstrip("."): generator
        for prefix, module in model.named_modules()
        for name, generator in _attributes(module)
        if isinstance(generator, KINDS)
    }


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, attribute in vars(module).items():
        yield name, attribute
        if isinstance(attribute, dict | list | tuple):
            items = attribute.items() if isinstance(attribute, dict) else enumerate(attribute)
            yield from ((f"{name}.{key}", element) for key, element in items)


def state_of_generator(generator: Any) -> tuple[Any]:
    """Return the state of a generator, one value; equal ones have equal pickles."""
    if isinstance(generator, torch.Generator):
        return (generator.get_state().numpy(),)
    if isinstance(generator, random.Random):
        return (generator.getstate(),)
    if isinstance(generator, np.random.Generator):
        return (generator.bit_generator.state,)
    return (generator.get_state(legacy=False),)


def reseed(generator: Any, seed: int) -> None:
    """Seed a generator."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits: Any = type(generator.bit_generator)
        generator.bit_generator.state = bits(seed).state
    else:
        generator.seed(seed)


def set_generator(generator: Any, state: tuple[Any]) -> None:
    """Set a generator to a state from `state_of_generator`."""
    if isinstance(generator, random.Random):
        generator.setstate(*state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.from_numpy(*state))
    elif isinstance(generator, np.random.Generator):
        (generator.bit_generator.state,) = state
    else:
        generator.set_state(*state)
