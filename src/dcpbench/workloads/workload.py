"""The workload of a cell: the model, its batches, and how it is trained. It is built from the config groups
`model`, `optimizer` and `scheduler`, or by a user's function."""

import fnmatch
import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dcpbench.compare.leaves import same_value
from dcpbench.config.schema import SEED_STRIDE, Config
from dcpbench.workloads import parallelisms
from dcpbench.workloads.batch import Batch, Share, leaves_of_batch, share_of, to_device
from dcpbench.workloads.generators import seed_generators
from dcpbench.workloads.optimizers import each_optimizer
from dcpbench.workloads.parallelisms import layers
from dcpbench.workloads.stateful import TAKEN, ObjectsByName

Loss = Callable[[nn.Module, Batch], Any]
"""Returns a scalar or, in a user's workload, a dictionary of scalars."""
UserStep = Callable[[nn.Module, Any, Batch], Any]
"""Takes a step and returns its loss, as `Loss` does."""


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Make Adam with its defaults."""
    return torch.optim.Adam(model.parameters())


@dataclass(frozen=True)
class Workload:
    """A model and how it is trained. It must be the same on every rank.

    Args:
        model: the plain model; dcpbench puts it under the parallelism of the cell. Of an `nn.ModuleDict`,
            which cannot be called, it does so with each entry.
        batch: `batch(generator)` draws the global batch of a step with a `torch.Generator` on the CPU: a
            tensor or array, or dictionaries, lists, tuples or dataclasses of them, of texts and of numbers.
        loss: `loss(model, share)` of the wrapped model and a rank's share of a batch: the mean over its
            samples, a scalar, or a dictionary of scalars, whose sum is trained on. For mixed precision use
            `torch.autocast` in it.
        optimizer: `optimizer(model)` of the wrapped model; a list or dictionary if there are several. There
            `model.named_parameters()` has the names of the plain model.
        scheduler: `scheduler(optimizer)` of what `optimizer` returned, if there is one; a list or dictionary
            if there are several. Each is stepped after each step, a `ReduceLROnPlateau` with the mean loss of
            all ranks.
        clip_grad_norm: scale all gradients down before each step, so that their common norm is at most this.
        accumulate: the number of parts of a rank's share, whose gradients accumulate before a step; each
            counts by its samples. Gradients are reduced after each part: there is no `no_sync`.
        share: `share(batch, number, of)` returns the part of a global batch for one of several data-parallel
            ranks, numbered from 0. By default samples are along the first dimension of tensors and arrays, or
            the items of lists (see `share_of`); graphs, packed sequences and other batches whose shapes do
            not show what a sample is need a function.
        step: `step(model, optimizers, share)` in place of `loss`, for more than one backward pass before one
            step: it computes gradients, steps and returns the loss. `optimizers` is the list or dictionary
            that `optimizer` returned; a list, also of one.
            Gradients are cleared after it. Until an optimizer steps, or torch clips them, gradients must be
            sums over samples.
        layers: names of the layers that are sharded, recomputed or compiled separately, such as
            `("model.layers.*",)`. By default they are the children of the model, or theirs if they are
            containers.
        tp_plan: for tensor parallelism, `colwise` or another style by the names of modules; one on the
            command line replaces it (`parallel.tp_plan`).
        state: objects that are saved in addition, by name, or `state(model)` of the wrapped model, called
            before `optimizer`, that returns them: modules, which are saved under their FQNs, such as averages
            of weights, and others with `state_dict` and `load_state_dict`.
        not_saved: patterns such as `base.*` for the names of everything that no checkpoint has: FQNs of the
            model, which must then be the same in each build; names of `state`; and the default generators
            `random.cpu`, `random.cuda`, `random.python` and `random.numpy`.
    """

    model: nn.Module
    batch: Callable[[torch.Generator], Batch]
    loss: Loss | None = None
    optimizer: Callable[[nn.Module], Optimizer | list[Optimizer] | dict[str, Optimizer]] = adam
    scheduler: Callable[[Any], Any] | None = None
    clip_grad_norm: float | None = None
    accumulate: int = 1
    share: Share = share_of
    step: UserStep | None = None
    layers: Sequence[str] = ()
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    state: ObjectsByName | None = None
    not_saved: Sequence[str] = ()


def is_trainer(value: object) -> bool:
    """Return whether a class or object has the methods of a trainer."""
    return all(callable(getattr(value, name, None)) for name in ("step", "save", "load"))


def workload_of(config: Config) -> Workload:
    """Build the workload of a cell.

    Raises:
        TypeError, ValueError: `workload.target` does not return a `Workload`, or one of its fields cannot be
            used.
    """
    if config.workload.target is None:
        return of_groups(config)
    made = pkgutil.resolve_name(config.workload.target)(**config.workload.options)
    where = f"workload.target={config.workload.target}"
    if not isinstance(made, Workload):
        trainer = "; if it is a trainer, add checkpointer=trainer" if is_trainer(made) else ""
        wrong = f"returned a {type(made).__name__}; must return a dcpbench.api.Workload{trainer}"
        raise TypeError(f"{where}: {wrong}")
    if (made.loss is None) == (made.step is None):
        raise TypeError(f"{where}: loss, step: pass one of the two")
    for name in ("batch", "loss", "optimizer", "scheduler", "share", "step"):
        if not (callable(is_given := getattr(made, name)) or (name in _OPTIONAL and is_given is None)):
            raise TypeError(f"{where}: {name} is a {type(is_given).__name__}; pass a function (see Workload)")
    if not isinstance(made.accumulate, int) or made.accumulate < 1:
        raise ValueError(f"{where}: accumulate={made.accumulate!r}; pass a whole number, at least 1")
    if not isinstance(made.model, nn.Module):
        raise TypeError(f"{where}: model is a {type(made.model).__name__}; pass a torch.nn.Module")
    for name, is_given in made.model.named_parameters():
        if is_lazy(is_given):
            wrong = f"{name} has no shape before the first forward pass (a lazy module)"
            raise ValueError(f"{where}: model: {wrong}; call the model once in the function that builds it")
    norm = made.clip_grad_norm
    if norm is not None and not (isinstance(norm, int | float) and norm > 0):
        raise ValueError(f"{where}: clip_grad_norm={norm!r}; pass a number above 0, or None")
    if isinstance(made.layers, str):
        raise TypeError(f"{where}: layers={made.layers!r}; pass a list of names")
    if not isinstance(made.tp_plan, Mapping):
        raise TypeError(f"{where}: tp_plan is a {type(made.tp_plan).__name__}; pass a dictionary")
    try:
        layers(made.model, made.layers)
        parallelisms.check_plan(made.model, made.tp_plan)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if isinstance(made.not_saved, str) or not all(isinstance(pattern, str) for pattern in made.not_saved):
        raise TypeError(f"{where}: not_saved={made.not_saved!r}; pass a list of names or patterns")
    if not (made.state is None or isinstance(made.state, Mapping) or callable(made.state)):
        kind = type(made.state).__name__
        raise TypeError(f"{where}: state is a {kind}; pass a dictionary, or a function (see Workload)")
    made = replace(made, state=partial(_objects, made.state, where))
    if made.loss:
        return replace(made, loss=partial(_total, made.loss, f"{where}: loss"))
    assert made.step is not None
    for name, is_given in ("accumulate", made.accumulate > 1), ("clip_grad_norm", norm is not None):
        if is_given:
            raise ValueError(f"{where}: step: {name} does not apply; do it in step")
    return replace(made, step=partial(_total, made.step, f"{where}: step"))


def is_not_saved(workload: Workload, name: str) -> bool:
    """Return whether a workload leaves this name out of checkpoints."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in workload.not_saved)


def _objects(state: ObjectsByName | None, where: str, model: nn.Module) -> Mapping[str, Any]:
    """Return the objects of a user's workload.

    Raises:
        TypeError, ValueError: one cannot be saved, or its name is taken.
    """
    objects = state(model) if callable(state) else state or {}
    if not isinstance(objects, Mapping):
        raise TypeError(f"{where}: state returned a {type(objects).__name__}; return a dictionary")
    for name, holder in objects.items():
        if not isinstance(name, str) or not name or "." in name or name in TAKEN:
            taken = ", ".join(TAKEN)
            raise ValueError(
                f"{where}: state: {name!r} is no free name; pass a text without dots, not {taken}"
            )
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(holder, method, None)):
                raise TypeError(
                    f"{where}: state: {name!r} is a {type(holder).__name__} without {method}; add it"
                )
    return objects


_OPTIONAL = ("loss", "scheduler", "step")


def _total(function: Callable[..., Any], where: str, *args: Any) -> torch.Tensor:
    """Return the loss of a user's workload, the sum if it is a dictionary.

    Raises:
        TypeError: it is, or contains, anything but scalars.
    """
    returned = function(*args)
    parts = returned if isinstance(returned, Mapping) and returned else {"": returned}
    for name, scalar in parts.items():
        if not isinstance(scalar, torch.Tensor) or scalar.numel() != 1:
            shape = f" of shape {tuple(scalar.shape)}" if isinstance(scalar, torch.Tensor) else ""
            named = f" with {name!r}" if name else ""
            empty = "n empty" if isinstance(scalar, Mapping | list | tuple) and not scalar else ""
            wrong = f"{where} returned{named} a{empty} {type(scalar).__name__}{shape}"
            raise TypeError(f"{wrong}; return a scalar tensor, or a dictionary of them{_place(function)}")
    total: torch.Tensor = functools.reduce(torch.add, parts.values())
    return total


def _place(function: Callable[..., Any]) -> str:
    """Return the line of a user's function, as ` (my_model.py:31)`, if it is known."""
    while isinstance(function, partial):
        function = function.func
    called = function if inspect.isroutine(function) else type(function).__call__
    code = getattr(inspect.unwrap(called), "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""


def of_groups(config: Config) -> Workload:
    """Build a workload from config groups: a model that learns random targets. They lie in [1, 2), away from
    zero, so that the loss is not zero."""
    model: Any = pkgutil.resolve_name(config.model.target)(**config.model.options)
    size = config.model.batch_size

    def batch(generator: torch.Generator) -> Batch:
        inputs = torch.rand(size, model.input_size, generator=generator, device="cpu")
        return inputs, 1 + torch.rand(size, model.output_size, generator=generator, device="cpu")

    def loss(wrapped: nn.Module, share: Batch) -> torch.Tensor:
        inputs, targets = share
        # In one dtype: torch 2.11 has no gradient of a loss of two.
        return F.mse_loss(wrapped(inputs).to(targets.dtype), targets)

    def optimizer(wrapped: nn.Module) -> torch.optim.Optimizer:
        groups = pkgutil.resolve_name(config.optimizer.groups)(wrapped)
        made: torch.optim.Optimizer = pkgutil.resolve_name(config.optimizer.target)(
            groups, **config.optimizer.hyperparameters()
        )
        for inner_optimizer in each_optimizer(made):
            # Free the gradients right after a step, as trainers do.
            inner_optimizer.register_step_post_hook(lambda stepped, *_: stepped.zero_grad())
            if not (config.parallel.foreach and config.loading.foreach):
                for options in (inner_optimizer.defaults, *inner_optimizer.param_groups):
                    if options.get("foreach", True) is None and not options.get("fused"):
                        options["foreach"] = False
        return made

    scheduler = partial(pkgutil.resolve_name(config.scheduler.target), **config.scheduler.options)
    return Workload(model, batch, loss, optimizer, scheduler)


@dataclass(frozen=True)
class Batches:
    """The global batches of a cell. They depend on the seed and the step alone: they are drawn on the CPU, by
    a separate generator, while the default ones have the same seed.

    Args:
        draw: `Workload.batch`.
        device: where the batches go.
    """

    seed: int
    draw: Callable[[torch.Generator], Batch]
    device: torch.device

    def seed_of(self, step: int) -> int:
        """Return the seed of generators for the batch of a step, counted from 1."""
        return self.seed * SEED_STRIDE + step

    def at(self, step: int) -> Batch:
        """Return the batch of a step, counted from 1."""
        generator = torch.Generator().manual_seed(self.seed_of(step))
        return to_device(self.draw(generator), self.device)


def batches_of(config: Config, device: torch.device) -> Batches:
    """Build the batches of a cell; a user's trainer has its own.

    Raises:
        TypeError, ValueError: a user's `batch` does not return the same batch for the same generator.
    """
    if config.own_trainer:
        return Batches(config.seed, lambda _: None, device)
    # A user's workload may keep the tensors that batches are made from, and draw them when it is built. In a
    # stage that loads, no other is built from this seed.
    seed_generators(config.seed, device)
    with device if config.workload.target else torch.device("meta"):
        workload = workload_of(config)
        batches = Batches(config.seed, workload.batch, device)
    if config.workload.target:
        _check_first(config, workload, batches)
    return batches


def _check_first(config: Config, workload: Workload, batches: Batches) -> None:
    """Draw the first batch of a user's workload twice: one that comes from an iterator is another one, or not
    a batch at all.

    Raises:
        TypeError, ValueError: `batch` does not return the same batch for the same generator.
    """
    where = f"workload.target={config.workload.target}: batch(generator)"
    drawn: list[Batch] = []
    for _ in range(2):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            try:
                drawn.append(batches.at(1))
            except StopIteration as error:
                raise ValueError(f"{where} has no more data: {_DRAW}") from error
        if isinstance(drawn[-1], Iterator):
            raise TypeError(f"{where} returned a {type(drawn[-1]).__name__}; return one batch")
    if workload.share is share_of:
        try:
            share_of(drawn[0], 0, 1)
        except TypeError as error:
            raise TypeError(f"{where} {error}") from None
    if not same_value(*map(leaves_of_batch, drawn)):
        raise ValueError(f"{where} returned two different batches for the same generator: {_DRAW}")


_DRAW = "draw each batch with the generator alone, not from an iterator"
