"""Compute what our Triton kernel computes, without a GPU and without Triton: its programs, one by one,
on numpy's arrays, whose integers wrap around as Triton's do."""

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


class _Array(np.ndarray):
    def to(self, dtype: type) -> "_Array":
        return self.astype(dtype)


def _array(value: Any, dtype: type) -> Any:
    return np.asarray(value, dtype).view(_Array)


class _Pointer:
    """An array in memory, and numbers of its elements."""

    def __init__(self, memory: np.ndarray, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, further: Any) -> "_Pointer":
        return _Pointer(self.memory, self.at + further)

    def inside(self, mask: Any) -> None:
        """Raise where anything is read or written that does not belong to the array."""
        at = np.broadcast_to(self.at, mask.shape)[mask]
        if at.size and not (at.min() >= 0 and at.max() < self.memory.size):
            raise IndexError(f"elements {at.min()} to {at.max()} of {self.memory.size}")


class Triton:
    """What `triton` and `triton.language` are; `launched` has how many programs there were, each time."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.language = SimpleNamespace(
            constexpr=None, int64=np.int64, uint32=np.uint32, uint64=np.uint64, static_range=range,
            program_id=lambda axis: _array(self._program[axis], np.int32),
            num_programs=lambda axis: self._grid[axis],
            arange=lambda begin, end: _array(np.arange(begin, end), np.int32),
            zeros=lambda shape, dtype: _array(np.zeros(shape), dtype),
            where=lambda mask, one, other: np.where(mask, one, one.dtype.type(other)).view(_Array),
            sum=lambda values: _array(values.sum(dtype=values.dtype), values.dtype),
            load=self._load, store=self._store,
        )  # fmt: skip
        self.module = SimpleNamespace(jit=lambda **_: lambda kernel: SimpleLaunch(self, kernel))

    def launch(
        self, kernel: Callable[..., None], grid: tuple[int, ...], *values: Any, **options: Any
    ) -> None:
        """Run a kernel; tensors are what it has pointers to."""
        self._grid = grid
        self.launched.append(int(np.prod(grid)))
        given = [_Pointer(one.numpy()) if isinstance(one, torch.Tensor) else one for one in values]
        for self._program in product(*map(range, grid)):
            kernel(*given, **options)

    def _load(self, pointer: _Pointer, mask: Any = None, other: int = 0) -> Any:
        at = np.asarray(pointer.at)
        mask = np.full(at.shape, True) if mask is None else mask
        pointer.inside(mask)
        found = pointer.memory.take(np.where(mask, at, 0))
        return np.where(mask, found, found.dtype.type(other)).view(_Array)

    def _store(self, pointer: _Pointer, value: Any) -> None:
        pointer.inside(np.full(np.shape(pointer.at), True))
        pointer.memory.reshape(-1)[pointer.at] = value


class SimpleLaunch:
    """`kernel[grid](...)`."""

    def __init__(self, triton: Triton, kernel: Callable[..., None]) -> None:
        self.triton, self.kernel = triton, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*values: Any, num_warps: int, **options: Any) -> None:
            self.triton.launch(self.kernel, grid, *values, **options)

        return launch
