"""The default random generators that training may draw from: those of torch on the CPU and on the device, and
those of Python and NumPy. Each state is a tensor, as a checkpoint has it."""

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

OF_TORCH = ("cpu", "cuda")
ALL = (*OF_TORCH, "python", "numpy")

States = dict[str, torch.Tensor]
"""The state of each generator by its name."""


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed all of them. `torch.manual_seed` seeds those of all devices, and formats a stack for each that is
    not in use."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
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
