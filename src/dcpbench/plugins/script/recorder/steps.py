"""What each optimizer step depends on, recorded right before it.

A record has the digests of weights, gradients, optimizer state, frozen parameters and buffers, the
hyperparameters, how many modules are in training mode, the batch (what entered the models) and the loss.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import random
import sys
import threading
import weakref
import zlib
from typing import Any, Callable

from .digests import digest, fetched, held
from .log import Log
from .names import Names

_PARALLEL = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "OptimizedModule"}


class _Optimizer:
    """An optimizer: its number in the order of first steps, and its `count` of steps.

    Args:
        backwards: how many backward passes there were at its last step.
        is_ignored: its step is no step of training.
        keys: the names of its values as they were written last, by kind.
    """

    def __init__(self, number: int) -> None:
        self.number, self.count, self.backwards, self.is_ignored = number, 0, 0, False
        self.keys: dict[str, list[str]] = {}


class Steps:
    """The optimizer steps of this process."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._names = Names()
        self._optimizers: weakref.WeakKeyDictionary[Any, _Optimizer] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._inside = threading.local()
        self._backwards = 0
        self._is_started = False
        self._begin()

    def _begin(self) -> None:
        self._calls = 0
        self._batch: list[Any] = []
        self._losses: list[Any] = []
        self._before: dict[str, Any] = {}
        self._start_buffers: list[Any] = []

    def called(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the input of an outermost call of a module with parameters."""
        if next(module.parameters(), None) is None:
            return
        self._names.add(module)
        if not self._before:
            self._before = {"modes": {}, "generators": _generators()}
            if not self._is_started:
                buffers = self._names.others(set())[1]
                self._start_buffers = [(name, digest(value)) for name, value in buffers]
        name, mode = self._names.mode(module)
        self._before["modes"].setdefault(name, mode)
        self._batch += [
            (f"{self._calls}{name}", value)
            for name, value in held([args, kwargs])
            if not isinstance(value, str)
        ]
        self._calls += 1

    def backward(self, tensors: Any) -> None:
        """Record the loss that a backward pass begins with."""
        self._backwards += 1
        first: Any = tensors[0] if isinstance(tensors, (tuple, list)) and tensors else tensors
        if getattr(first, "numel", lambda: 0)() == 1:
            first = getattr(first, "_local_tensor", first).detach()
            # The bits of a float64 are fetched like digests.
            bits = first.double().reshape(()).view(_torch().int64)
            self._losses.append((str(len(self._losses)), bits))

    def before(self, optimizer: Any) -> None:
        """Record a step before it is made, and make the stop that is due."""
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = _Optimizer(next(self._numbers))
        known = self._optimizers[optimizer]
        # Without a backward pass it is no step of training: DCP makes one to create the optimizer's state.
        known.is_ignored = self._log.makes_up or 0 < self._backwards == known.backwards
        if known.is_ignored:
            return
        known.backwards = self._backwards
        self._log.guarded(self._record, optimizer, known)
        if known.number == 0:  # unguarded: a signal's handler may raise what the script expects
            self._log.stop.before_step(known.count + 1)

    def _record(self, optimizer: Any, known: _Optimizer) -> None:
        hyper = [
            {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]
        values: dict[str, Any] = {"hyper": hyper, **self._before}
        digests = {"batch": self._batch}
        if known.count < 2 or known.count % self._log.every == 0 or self._log.has_saved:
            digests |= self._state(optimizer)
        if self._losses:
            digests["loss"] = self._losses
        if not self._is_started:
            values["about"] = self._about()
            digests["start_buffers"] = self._start_buffers
        self._is_started, self._log.has_saved = True, False
        numbers = iter(fetched([value for entries in digests.values() for _, value in entries]))
        names = {}
        for kind, entries in digests.items():
            keys = [name for name, _ in entries]
            values[kind] = [next(numbers) for _ in keys]
            if known.keys.get(kind) != keys:
                known.keys[kind] = names[kind] = keys
        self._log.write("step", rank=self._log.rank, o=known.number, names=names, **values)
        self._begin()

    def after(self, optimizer: Any) -> None:
        """Count a step that was made."""
        known = self._optimizers[optimizer]
        if not known.is_ignored:
            known.count += 1
            self._begin()  # without what a closure did in the step
            if known.number == 0:
                self._log.steps = known.count

    def _state(self, optimizer: Any) -> dict[str, list[tuple[str, Any]]]:
        """Return the digests of all that an optimizer changes, and of what its models have in addition."""
        weights, gradients, moments = [], [], []
        changed: set[int] = set()
        for place, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                changed.add(id(parameter))
                name = self._names.of(parameter, f"group{place}[{index}]")
                weights.append((name, digest(parameter)))
                if parameter.grad is not None:
                    gradients.append((name, digest(parameter.grad)))
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, _torch().Tensor):
                        moments.append((f"{name}.{key}", digest(value)))
                    elif isinstance(value, (bool, int, float)):
                        moments.append((f"{name}.{key}", value))
        frozen, buffers = self._names.others(changed)
        return {
            "weights": weights,
            "gradients": gradients,
            "moments": moments,
            "frozen": [(name, digest(value)) for name, value in frozen],
            "buffers": [(name, digest(value)) for name, value in buffers],
        }

    def _about(self) -> dict[str, Any]:
        """Return what is known about a process that trains."""
        torch = _torch()
        distributed = torch.distributed
        is_parallel = distributed.is_available() and distributed.is_initialized()
        modules = [module for root in self._names.roots for module in root.modules()]
        wrappers = {kind.__name__ for module in modules for kind in type(module).__mro__} & _PARALLEL
        if any(getattr(module, "_compiled_call_impl", None) is not None for module in modules):
            wrappers.add("OptimizedModule")
        devices = {value.device.type for root in self._names.roots for value in root.parameters()}
        return {
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "world_size": distributed.get_world_size() if is_parallel else 1,
            "backend": distributed.get_backend() if is_parallel else None,
            "devices": sorted(devices),
            "wrappers": sorted(wrappers),
        }

    # Hooks.

    def hook_before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a step; one with a closure after the closure's first call, which makes the gradients."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.before(optimizer)
            return None
        is_recorded = False

        def recorded() -> Any:
            nonlocal is_recorded
            result = closure()
            if not is_recorded:
                is_recorded = True
                self.before(optimizer)
            return result

        others = {key: value for key, value in kwargs.items() if key != "closure"}
        return (optimizer, recorded, *args[2:]), others

    def wrapped_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Module.__call__`, which records outermost calls. A compiler does not see the difference."""
        is_compiling = _torch().compiler.is_compiling
        grad_enabled = _torch().is_grad_enabled
        inside, steps, log = self._inside, self, self._log

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if is_compiling() or getattr(inside, "on", False):
                return call(self, *args, **kwargs)
            inside.on = True
            try:
                if grad_enabled():
                    log.guarded(steps.called, self, args, kwargs)
                return call(self, *args, **kwargs)
            finally:
                inside.on = False

        # A compiler skips the frames of torch's own file, as it would without the recorder.
        file = _torch().nn.modules.module.__file__
        __call__.__code__ = __call__.__code__.replace(co_filename=file)
        return __call__

    def wrapped_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that begins a backward pass, and records it."""

        @functools.wraps(function)
        def recorded(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not _torch().compiler.is_compiling():
                self._log.guarded(self.backward, tensors)
            return function(tensors, *args, **kwargs)

        return recorded


def install(torch: Any, log: Log) -> None:
    """Hook into torch, right after its import."""
    from torch.optim import optimizer

    steps = Steps(log)
    # A compiler takes functions, not methods, and must not look into them.
    optimizer.register_optimizer_step_pre_hook(torch._disable_dynamo(lambda *args: steps.hook_before(*args)))
    optimizer.register_optimizer_step_post_hook(torch._disable_dynamo(lambda of, *args: steps.after(of)))
    torch.nn.Module.__call__ = steps.wrapped_call(torch.nn.Module.__call__)
    for name in ("backward", "grad"):
        setattr(torch.autograd, name, steps.wrapped_backward(getattr(torch.autograd, name)))
    atexit.register(log.stop.before_step, 0)  # a file is cut to half after the last step too


def ignore_made_up_steps(module: Any, log: Log) -> None:
    """Ignore the step that DCP makes to create the state of an optimizer."""
    function = module._init_optim_state

    @functools.wraps(function)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        log.makes_up = True
        try:
            return function(*args, **kwargs)
        finally:
            log.makes_up = False

    module._init_optim_state = quiet


def _generators() -> dict[str, Any]:
    torch = _torch()
    states = {
        "torch": digest(torch.random.default_generator.get_state()),
        "Python": hash(random.getstate()[1]),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        states["CUDA"] = digest(torch.cuda.default_generators[device].get_state())
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        _, keys, *rest = numpy.random.get_state()
        states["NumPy"] = hash((zlib.crc32(keys.tobytes()), *rest))
    return states


def _plain(value: Any) -> Any:
    """Return a hyperparameter: numbers, texts and lists of them; not what differs in each process."""
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if hasattr(value, "item"):
        return value.item()
    return value if isinstance(value, (bool, int, float, str)) or value is None else "?"


def _torch() -> Any:
    import torch

    return torch
