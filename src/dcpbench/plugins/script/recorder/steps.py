"""What each optimizer step depends on, recorded right before it.

A record has the digests of weights, gradients, optimizer state, frozen parameters and buffers, the
hyperparameters, how many modules are in training mode, the batch (what entered the models) and the loss.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import weakref
import zlib
from typing import Any, Callable

from .digests import digest, fetched, held
from .log import Log
from .names import Names

_DIGESTED = ("weights", "frozen", "buffers", "moments", "gradients", "batch", "loss", "start_buffers")


class Steps:
    """The optimizer steps of this process."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._names = Names()
        self._optimizers: list[weakref.ref[Any]] = []
        self._counts: dict[int, int] = {}
        self._keys: dict[str, list[str]] = {}
        self._unchanged: dict[str, tuple[Any, ...]] = {}
        self._inside = threading.local()
        self._backwards = 0
        self._at_step: dict[int, int] = {}
        self._made_up = False
        self._ignored: set[int] = set()
        self._spent_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self._calls = 0
        self._batch: list[Any] = []
        self._losses: list[Any] = []
        self._before: dict[str, Any] = {}

    # What a step depends on.

    def called(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the input of an outermost call of a module with parameters."""
        began = time.perf_counter()
        self._log.quiet.on = True
        try:
            if next(module.parameters(), None) is not None:
                self._names.add(module)
                if not self._before:
                    self._before = {"modes": {}, "generators": _generators()}
                    if not self._counts:
                        self._before["buffers"] = [(n, digest(t)) for n, t in self._names.others(set())[1]]
                name, mode = self._names.mode(module)
                self._before["modes"].setdefault(name, mode)
                entered = [
                    (name, value) for name, value in held([args, kwargs]) if not isinstance(value, str)
                ]
                self._batch += [(f"{self._calls}{name}", value) for name, value in entered]
                self._calls += 1
        finally:
            self._log.quiet.on = False
            self._spent_s += time.perf_counter() - began

    def backward(self, tensors: Any) -> None:
        """Record the loss that a backward pass begins with."""
        self._backwards += 1
        first: Any = tensors[0] if isinstance(tensors, (tuple, list)) and tensors else tensors
        if getattr(first, "numel", lambda: 0)() == 1:
            first = getattr(first, "_local_tensor", first)
            first = first.detach()
            # The bits of a float64 are fetched like digests.
            self._losses.append(first.double().reshape(()).view(_torch().int64))

    def before(self, optimizer: Any) -> None:
        """Record a step before it is made, and make the stop that is due."""
        number = self._number(optimizer)
        self._log.guarded(self._record, optimizer, number)
        if number == 0 and 0 not in self._ignored:  # a signal's handler may raise what the script expects
            self._log.stop.before_step(self._counts.get(0, 0) + 1)

    def _record(self, optimizer: Any, number: int) -> None:
        began = time.perf_counter()
        # Without a backward pass it is no step of training: DCP makes one to create the optimizer's state.
        if self._made_up or (self._backwards and self._at_step.get(number) == self._backwards):
            self._ignored.add(number)
            return
        self._ignored.discard(number)
        self._at_step[number] = self._backwards
        self._log.quiet.on = True
        try:
            count = self._counts.setdefault(number, 0)
            values: dict[str, Any] = {
                "hyper": [_plain(group) for group in optimizer.param_groups],
                "calls": self._calls,
                **{name: value for name, value in self._before.items() if name != "buffers"},
            }
            is_first = len(self._counts) == 1 and count == 0
            is_full = count < 2 or count % self._log.every == 0 or self._log.has_saved
            self._log.has_saved = False
            digests = {**self._state(optimizer, is_full), "batch": self._batch}
            if is_first:
                values |= _about()
                digests["start_buffers"] = self._before.get("buffers", [])
            if self._losses:
                digests["loss"] = [(str(at), loss) for at, loss in enumerate(self._losses)]
            self._write(number, count, values, digests)
            self._begin()
        finally:
            self._log.quiet.on = False
            self._spent_s += time.perf_counter() - began

    def after(self, optimizer: Any) -> None:
        """Count a step that was made."""
        number = self._number(optimizer)
        if number not in self._ignored:
            self._counts[number] = self._counts.get(number, 0) + 1
            self._begin()  # without what a closure did in the step
            if number == 0:
                self._log.steps = self._counts[0]

    def _state(self, optimizer: Any, is_full: bool) -> dict[str, list[tuple[str, Any]]]:
        weights, gradients, moments = [], [], []
        known: set[int] = set()
        for place, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                known.add(id(parameter))
                if not is_full:
                    continue
                name = self._names.of(parameter, f"group{place}[{index}]")
                weights.append((name, digest(parameter)))
                if parameter.grad is not None:
                    gradients.append((name, digest(parameter.grad)))
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, _torch().Tensor):
                        moments.append((f"{name}.{key}", digest(value)))
                    elif isinstance(value, (bool, int, float)):
                        moments.append((f"{name}.{key}", value))
        if not is_full:
            return {}
        frozen, buffers = self._names.others(known)
        return {
            "weights": weights,
            "gradients": gradients,
            "moments": moments,
            "frozen": [(name, self._once(name, value)) for name, value in frozen],
            "buffers": [(name, digest(value)) for name, value in buffers],
        }

    def _once(self, name: str, tensor: Any) -> Any:
        """Return the digest of a tensor that seldom changes. A kernel can change a buffer without a trace."""
        try:
            now = tensor.data_ptr(), tensor._version, tensor.numel()
        except RuntimeError:  # a tensor without storage, or of inference mode
            return digest(tensor)
        if self._unchanged.get(name, ())[:-1] != now:
            self._unchanged[name] = (*now, fetched([digest(tensor)])[0])
        return self._unchanged[name][-1]

    def _write(
        self, number: int, count: int, values: dict[str, Any], digests: dict[str, list[tuple[str, Any]]]
    ) -> None:
        """Write a step; names are written when they change."""
        numbers = fetched([value for kind in _DIGESTED for _, value in digests.get(kind, ())])
        names, at = {}, 0
        for kind in _DIGESTED:
            if kind not in digests:
                continue
            keys = [name for name, _ in digests[kind]]
            values[kind] = numbers[at : at + len(keys)]
            at += len(keys)
            place = f"{number}.{kind}"
            if self._keys.get(place) != keys:
                self._keys[place] = names[kind] = keys
        self._log.write("step", rank=self._log.rank, o=number, n=count, names=names, **values)

    def _number(self, optimizer: Any) -> int:
        for number, reference in enumerate(self._optimizers):
            if reference() is optimizer:
                return number
        self._optimizers.append(weakref.ref(optimizer))
        return len(self._optimizers) - 1

    def ended(self) -> None:
        """Write how long recording took, when the process ends."""
        if self._counts:
            self._log.write("end", spent_s=self._spent_s)
            self._log.stop.before_step(0)

    # Hooks.

    def hook_before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a step; one with a closure after the closure's first call, which makes the gradients."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.before(optimizer)
            return None
        calls: list[int] = []

        def recorded(*inner: Any, **named: Any) -> Any:
            result = closure(*inner, **named)
            calls.append(1)
            if len(calls) == 1:
                self.before(optimizer)
            return result

        if len(args) > 1:
            return (args[0], recorded, *args[2:]), kwargs
        return args, {**kwargs, "closure": recorded}

    def hook_after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a step."""
        self.after(optimizer)

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

    def made_up(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose optimizer steps are ignored."""

        def quiet(*args: Any, **kwargs: Any) -> Any:
            self._made_up = True
            try:
                return function(*args, **kwargs)
            finally:
                self._made_up = False

        return quiet


def install(torch: Any, log: Log) -> None:
    """Hook into torch, right after its import."""
    import atexit

    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    global _steps
    _steps = steps = Steps(log)
    # A compiler takes functions, not methods, and must not look into them.
    register_optimizer_step_pre_hook(torch._disable_dynamo(lambda *args: steps.hook_before(*args)))
    register_optimizer_step_post_hook(torch._disable_dynamo(lambda *args: steps.hook_after(*args)))
    torch.nn.Module.__call__ = steps.wrapped_call(torch.nn.Module.__call__)
    for name in ("backward", "grad"):
        setattr(torch.autograd, name, _counting(getattr(torch.autograd, name), steps, log))
    atexit.register(steps.ended)


def ignore_made_up_steps(module: Any, log: Log) -> None:
    """Ignore the step that DCP makes to create the state of an optimizer."""
    if _steps is not None and hasattr(module, "_init_optim_state"):
        module._init_optim_state = _steps.made_up(module._init_optim_state)


_steps: Steps | None = None


def _counting(function: Callable[..., Any], steps: Steps, log: Log) -> Callable[..., Any]:
    import functools

    @functools.wraps(function)
    def counted(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not _torch().compiler.is_compiling():
            log.guarded(steps.backward, tensors)
        return function(tensors, *args, **kwargs)

    return counted


def _about() -> dict[str, Any]:
    """Return what is known about a process that trains."""
    torch = _torch()
    distributed = torch.distributed
    parallel = distributed.is_available() and distributed.is_initialized()
    wrappers = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
    found: set[str] = set()
    devices: set[str] = set()
    for root in _steps._names.roots if _steps else []:
        for module in root.modules():
            found |= {kind.__name__ for kind in type(module).__mro__} & {*wrappers, "OptimizedModule"}
            if getattr(module, "_compiled_call_impl", None) is not None:
                found.add("OptimizedModule")
        devices |= {value.device.type for value in root.parameters()}
    return {
        "about": {
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "world_size": distributed.get_world_size() if parallel else 1,
            "backend": distributed.get_backend() if parallel else None,
            "devices": sorted(devices),
            "wrappers": sorted(found),
        }
    }


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


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group; tensors on the CPU as numbers, others as digests."""
    plain: dict[str, Any] = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        if isinstance(value, _torch().Tensor):
            on_cpu = value.device.type == "cpu" and value.numel() == 1
            plain[key] = value.item() if on_cpu else fetched([digest(value)])[0]
        elif isinstance(value, (list, tuple)):
            plain[key] = [float(one) if hasattr(one, "item") else one for one in value]
        else:
            plain[key] = value if isinstance(value, (bool, int, float, str)) or value is None else "?"
    return plain


def _torch() -> Any:
    import torch

    return torch
