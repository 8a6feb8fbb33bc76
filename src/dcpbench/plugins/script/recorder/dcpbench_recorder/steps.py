"""The values that each optimizer step depends on, recorded right before it."""

from __future__ import annotations

import atexit
import functools
import os
import re
import sys
import threading
import traceback
import weakref
from collections import Counter
from typing import Any, Callable, Collection

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from .digests import Parts, digests, fetched, held, is_traced, leaves, rows
from .generators import states
from .log import Log

_WRAPPERS = re.compile(
    r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|^module)\."
)
_FRAMEWORKS = ("transformers", "accelerate", "lightning", "timm")


class Steps:
    """The optimizer steps of this process. Models are numbered as they are built, so that a resume which
    calls them in another order gives them the same names; optimizers as they first make a step."""

    def __init__(self, log: Log) -> None:
        self._log = log
        # Those with a parameter or module that was registered, in the order of the first one, and those that
        # were called: a copy, or one that was unpickled, registers nothing. By id, because one that is being
        # built may have no hash yet.
        self._built: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._models = weakref.WeakSet[torch.nn.Module]()
        self._parents = weakref.WeakKeyDictionary[torch.nn.Module, Any]()
        self._optimizers = weakref.WeakKeyDictionary[Any, int]()
        # Of a called module: its name, and the modules whose mode acts.
        self._acting = weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, list[Any]]]()
        self._owners: dict[int, int] = {}  # of parameters, by id: the number of their optimizer
        self._counted: set[int] = set()
        self._counts: Counter[int] = Counter()
        self._recorded: set[int] = set()  # the optimizers that are making a step which is recorded
        # Optimizers that made a step since the first one of these did: all count as one step, as of a GAN.
        self._round: dict[int, int] = {}
        self._inside = threading.local()
        self._begin()

    def _begin(self) -> None:
        self._calls = 0
        self._parts: Parts = {"generators": {}, "buffers": {}, "modes": {}, "batch": {}, "loss": {}}
        self._parts["rows"] = {}

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the input of an outermost call of a module with parameters."""
        if self._log.is_in_backward or next(module.parameters(), None) is None or is_traced():
            return
        root = module
        while (parent := self._parent(root)) is not None:  # for names in the root
            root = parent
        self._models.add(root)
        self._add(root)
        if module not in self._acting:
            number = self._roots().index(root)
            acting = [weakref.ref(inner) for inner in module.modules() if _reads_mode(inner)]
            path = next(path for path, inner in root.named_modules() if inner is module)
            self._acting[module] = f"{type(root).__name__} {number}{'.' * bool(path)}{path}", acting
        name, acting = self._acting[module]
        mode = sum(inner.training for inner in (reference() for reference in acting) if inner is not None)
        if not self._calls:
            self._parts["generators"] = states()
            self._parts["buffers"] = digests(dict(self._named("named_buffers").values()))
        self._parts["modes"].setdefault(name, mode)
        for key, value in held({f"call {self._calls}": [args, kwargs]}).items():
            if not isinstance(value, str):
                self._parts["batch"][key] = value
        self._parts["rows"] |= {f"{self._calls} {row}": of for row, of in rows([args, kwargs]).items()}
        self._calls += 1

    def loaded(self, *_: Any, **__: Any) -> None:
        """Forget calls before a load: they see shapes, or create what is loaded into."""
        if not self._counts:
            self._begin()

    def registered(self, parent: torch.nn.Module, name: str, value: Any) -> None:
        """Note that a module has a parameter, or is the parent of another one."""
        self._add(parent)
        if isinstance(value, torch.nn.Module):
            self._parents[value] = weakref.ref(parent)

    def _add(self, module: torch.nn.Module) -> None:
        key = id(module)
        if key not in self._built:
            self._built[key] = weakref.ref(module, lambda _: self._built.pop(key, None))

    def _parent(self, module: torch.nn.Module) -> torch.nn.Module | None:
        return self._parents[module]() if module in self._parents else None

    def _roots(self) -> list[torch.nn.Module]:
        """Return the models, called or not, in the order in which they were built."""
        built = (reference() for reference in [*self._built.values()])
        return [of for of in built if of is not None and (of in self._models or self._parent(of) is None)]

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Record the loss that a backward pass begins with: its first argument."""
        first = [*args, *kwargs.values()][0]
        loss: Any = first[0] if isinstance(first, (tuple, list)) and first else first
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # then there is a loss of each sample
        if torch.is_tensor(loss) and loss.numel() == 1 and not is_wrapped(loss):
            loss = getattr(loss, "_local_tensor", loss).detach().double().reshape(())
            # The bits of a float64 are fetched like digests.
            self._parts["loss"][str(len(self._parts["loss"]))] = loss.view(torch.int64)

    def before(self, optimizer: Any) -> None:
        """Record a step before it is made, and make the stop that is due."""
        number = self._number(optimizer)
        # DCP makes steps to create the state that a checkpoint is loaded into; scripts do so at the start.
        callers = {frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._getframe())}
        has_trained = self._models or self._counts or self._parts["loss"]
        if number in self._recorded or not has_trained or "_init_optim_state" in callers:
            return
        if number in self._round and not self._recorded:
            self._round.clear()
        place = self._round.setdefault(number, len(self._round))
        self._recorded.add(number)
        self._log.trains_in = threading.get_ident()
        self._log.guarded(self._record, optimizer, number, place)
        if not place:  # unguarded: a signal's handler may raise what the script expects
            self._log.stop.before_step(self._log.steps + 1)

    def _number(self, optimizer: Any) -> int:
        """Return the number of an optimizer. One that is created for parameters of an earlier one, as when
        layers are unfrozen, takes its number and counts on; one that steps inside another has its own."""
        if optimizer not in self._optimizers:
            places = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
            known = [self._owners[place] for place in places if place in self._owners]
            number = min(known) if known and not self._recorded else 1 + max(self._counted, default=-1)
            self._optimizers[optimizer] = number
            self._counted.add(number)
            self._owners = {**dict.fromkeys(places, number), **self._owners}
        return self._optimizers[optimizer]

    def after(self, optimizer: Any) -> None:
        """Count a step that was made."""
        number = self._optimizers[optimizer]
        if number in self._recorded:
            self._recorded.remove(number)
            self._counts[number] += 1
            self._log.steps += not self._round[number]
            self._begin()  # without what a closure did in the step

    def _record(self, optimizer: Any, number: int, place: int) -> None:
        hyper = {
            f"group {place} {name}": value.item() if torch.is_tensor(value) else value
            for place, group in enumerate(optimizer.param_groups)
            for name, value in leaves(group)
            if name.partition(".")[0] not in ("params", "param_names")
        }
        parts = {"hyper": hyper, **self._parts}
        follows_save = os.path.exists(self._log.path(f"saved-{self._log.steps}"))
        if follows_save or self._counts[number] % self._log.every == 0:
            parts |= self._state(optimizer)
        if not self._counts:
            self._log.write("about", **self._about())
        parts = fetched(parts)
        for name, bits in parts["loss"].items():  # as text, in which NaN equals NaN
            parts["loss"][name] = repr(torch.tensor(bits, device="cpu").view(torch.float64).item())
        steps = self._log.steps + bool(place and next(iter(self._round)) in self._recorded)  # an inner one
        self._log.write("step", rank=self._log.place[0], optimizer=place, parts=parts, k=steps)
        self._begin()

    def _state(self, optimizer: Any) -> Parts:
        """Return the digests of all that an optimizer changes, and of the parameters that it does not."""
        weights, gradients, moments = {}, {}, {}
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        names = self._named("named_parameters", own)
        for place, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                name, _ = names.pop(id(parameter), (f"group{place}[{index}]", parameter))
                weights[name], moments[name] = parameter, optimizer.state.get(parameter, {})
                if parameter.grad is not None:
                    gradients[name] = parameter.grad
        return {
            "weights": digests(weights),
            "gradients": digests(gradients),
            "moments": held(moments),
            "frozen": digests(dict(names.values())),
        }

    def _named(self, method: str, own: Collection[int] = ()) -> dict[int, tuple[str, torch.Tensor]]:
        """Return the parameters, or the buffers, of the models that were called, and those of all models that
        have the ids `own`, by id with their names. Among these, and among the others, a name that an earlier
        model has too begins with the model's."""
        named: dict[int, tuple[str, torch.Tensor]] = {}
        taken, called = set[tuple[bool, str]](), set[int]()
        for number, model in enumerate(self._roots()):
            for path, value in getattr(model, method)():
                key = id(value)
                if key not in named:
                    name = _WRAPPERS.sub("", path)
                    name = f"{type(model).__name__}{number}.{name}" if (key in own, name) in taken else name
                    taken.add((key in own, name))
                    named[key] = name, value
                if model in self._models:
                    called.add(key)
        return {key: of for key, of in named.items() if key in own or key in called}

    def _about(self) -> dict[str, Any]:
        """Return what is known about a process that trains."""
        # No list of frames: it would keep the script's variables alive.
        stack = traceback.walk_stack(sys._getframe())
        callers = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in stack}
        distributed = torch.distributed
        is_parallel = distributed.is_available() and distributed.is_initialized()
        modules = [module for model in [*self._models] for module in model.modules()]
        classes = {kind.__name__ for module in modules for kind in type(module).__mro__}
        classes |= {"OptimizedModule" for module in modules if getattr(module, "_compiled_call_impl", None)}
        return {
            "torch": torch.__version__,
            "seed": torch.initial_seed(),
            "python": sys.version.split()[0],
            "world_size": distributed.get_world_size() if is_parallel else 1,
            "backend": distributed.get_backend() if is_parallel else None,
            "devices": sorted({value.device.type for model in self._models for value in model.parameters()}),
            "classes": sorted(classes),
            # Frameworks import one another: that in whose code the step is made comes first.
            "frameworks": sorted(
                filter(sys.modules.__contains__, _FRAMEWORKS), key=lambda name: name not in callers
            ),
        }

    # Hooks.

    def hook_before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a step; one with a closure after the closure's first call, which makes the gradients."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.before(optimizer)
            return None

        def recorded() -> Any:
            result = closure()
            self.before(optimizer)
            return result

        kwargs.pop("closure", None)
        return (optimizer, recorded, *args[2:]), kwargs

    def wrapped_backward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of autograd, in which modules are called to compute their activations again: with
        these, and not with a batch."""

        @functools.wraps(call)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if is_traced():
                return call(*args, **kwargs)
            self._log.guarded(self.backward, *args, **kwargs)
            before, self._log.is_in_backward = self._log.is_in_backward, True
            try:
                return call(*args, **kwargs)
            finally:
                self._log.is_in_backward = before

        return recorded

    def wrapped_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Module.__call__`, which records outermost calls. A compiler does not see the difference."""
        is_compiling, grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
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
        __call__.__code__ = __call__.__code__.replace(co_filename=torch.nn.modules.module.__file__)
        return __call__


def _reads_mode(module: torch.nn.Module) -> bool:
    """Tell whether a module computes something else in training mode: its forward reads it."""
    code = getattr(getattr(type(module).forward, "__wrapped__", type(module).forward), "__code__", None)
    return "training" in getattr(code, "co_names", ()) and getattr(module, "p", None) != 0


@functools.lru_cache(maxsize=None)
def install(log: Log) -> None:
    """Hook into torch, right after its import; once, if it is reloaded."""
    steps = Steps(log)
    # A compiler takes functions, not methods, and must not look into them.
    quiet: Callable[..., Any] = torch._disable_dynamo
    optimizers.register_optimizer_step_pre_hook(quiet(lambda *args: steps.hook_before(*args)))
    optimizers.register_optimizer_step_post_hook(quiet(lambda optimizer, *args: steps.after(optimizer)))
    torch.nn.Module.__call__ = steps.wrapped_call(torch.nn.Module.__call__)  # type: ignore[method-assign]
    registered = functools.partial(log.guarded, steps.registered)
    modules.register_module_module_registration_hook(registered)
    modules.register_module_parameter_registration_hook(registered)
    torch.nn.Module.load_state_dict = log.wrapped(  # type: ignore[method-assign]
        torch.nn.Module.load_state_dict, after=steps.loaded
    )
    for name in ("backward", "grad"):
        setattr(torch.autograd, name, steps.wrapped_backward(getattr(torch.autograd, name)))
    log.write("torch")
    if log.deterministic:  # what has no such algorithm warns, and does not repeat
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    log.mark_restart()
    created = functools.lru_cache(lambda: log.write("optimizer"))
    create = log.wrapped(torch.optim.Optimizer.__init__, after=lambda *_, **__: created())
    torch.optim.Optimizer.__init__ = create  # type: ignore[method-assign]
    atexit.register(log.stop.before_step, 0)  # a file is cut to half after the last step too
