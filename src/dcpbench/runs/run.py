"""A run: trained, saved, loaded and compared; and how its steps use gradients. It is dcpbench's own loop
(`own_run`) or a user's trainer (`own_trainer`)."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from dcpbench.compare.whole_tensors import dense
from dcpbench.core.mismatch import Mismatch, Place
from dcpbench.core.rank_report import Skip
from dcpbench.core.state import Name, StatePart
from dcpbench.runs.unsaved_values import UnsavedValues
from dcpbench.state.flags import HOOKS, snapshot_flags, snapshot_gradients
from dcpbench.state.snapshot import (
    Leaves,
    Slot,
    State,
    local_part,
    named_parts,
    parts_of_each,
    retained,
    snapshot_model,
    snapshot_nested,
    snapshot_optimizer,
)
from dcpbench.torch_private import GROUP_TO_CLIP
from dcpbench.workloads.generators import RandomState
from dcpbench.workloads.parallelisms import overwritten_buffers
from dcpbench.workloads.stateful import TrainState
from dcpbench.workloads.workload import Batches
from dcpbench.workloads.world import World


@dataclass(frozen=True)
class Exclusions:
    """What of a run cannot be compared, or not exactly, and why.

    Args:
        why_no_twin: why no plain model in one process can be compared with it.
        why_layout_bound: why its losses need not be those of another layout.
        why_no_replicas: why the copies of its parameters need not be equal after training, if it has no twin.
        not_compared: by check, why its state is not compared.
        left_out: the parts of the model that no checkpoint has, by FQN, so that each new run must have them.
        leaves_gradients: whether gradients can be left after a step.
        compute_dtypes: the dtypes that it computes in, in addition to those of its parameters.
        generators: the random generators whose state is saved and compared, by name; None means all. Another
            layout draws other numbers, so they cannot be restored there.
        changing: the attributes of a trainer that are compared: those that training changes. None until that
            has shown it, and of a workload, which says itself what is saved.
        why_not_resumed: why no resumed run can repeat its steps, if its twin has shown that.
    """

    why_no_twin: str | None = None
    why_layout_bound: str | None = None
    why_no_replicas: str | None = None
    not_compared: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    leaves_gradients: bool = False
    compute_dtypes: tuple[torch.dtype, ...] = ()
    generators: frozenset[str] | None = None
    changing: frozenset[Name] | None = None
    why_not_resumed: str | None = None

    def leaves_out(self, name: str) -> bool:
        """Return whether no checkpoint has this part of the model."""
        return any(name == left_out or name.startswith(f"{left_out}.") for left_out in self.left_out)

    def comparable(self, state: State) -> State:
        """Return a state with the attributes of a trainer that are compared alone."""
        if self.changing is None or StatePart.extra not in state:
            return state
        attributes = {name: leaf for name, leaf in state[StatePart.extra].items() if name in self.changing}
        return {**state, StatePart.extra: attributes}


NO_EXCLUSIONS = Exclusions()


class TrainingEndedError(Exception):
    """A run takes no further step, on any rank.

    Args:
        step: the last one that it has taken.
    """

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"the trainer ended after step {step}: {why}")
        self.step = step


class Run(Protocol):
    """A run on this rank. Both kinds share the methods that have a body.

    Attributes:
        world: the ranks that have it.
        sizes: the sizes of their mesh.
        optimizer: all of its optimizers as one.
        had_gradient: for each step, whether this rank had a gradient that is not zero: the losses of a dead
            net prove nothing.
        exclusions: what of it cannot be compared. The last step of the reference run shows which generators.
        comes_after: the last save or load of it.
        twin_bytes: an estimate of the memory of its unsharded twin; None if it has none.
    """

    world: World
    sizes: dict[str, int]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    random: RandomState
    train_state: TrainState
    had_gradient: list[bool]
    exclusions: Exclusions
    comes_after: Place = Place("before the first save")
    twin_bytes: int | None = None

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what a checkpointer saves, and loads into, by top-level key."""

    @abstractmethod
    def extra(self) -> State:
        """Return the state in addition to model, optimizer and random generators: `extra`, and `scheduler` if
        there is one."""

    def attributes(self) -> Leaves:
        """Return the state of which only what training changes is compared, in `extra`."""
        return {}

    def added_attributes(self) -> Leaves:
        """Return those of its attributes that are compared, and that a new run lacks."""
        return {}

    def not_held_elsewhere(
        self, mismatches: Iterable[Mismatch], saved: Leaves, before_a_step: bool = False
    ) -> list[Mismatch]:
        """Return the mismatches of attributes whose saved value is not held elsewhere. Before a step a number
        may be held as the next."""
        return [*mismatches]

    def unrestored_values(self, saved: Leaves) -> dict[str, str]:
        """Return both values of each attribute of an object in it that a load has not restored."""
        return {}

    @abstractmethod
    def unsaved_values(self) -> UnsavedValues:
        """Read plain values that are in no state dict."""

    @abstractmethod
    def train(self, batches: Batches, until: int) -> list[float]:
        """Train up to and including step `until`; return the global batch's loss of each step.

        Raises:
            TrainingEndedError: it ended before, on all ranks.
        """

    def slots(self) -> dict[StatePart, list[Slot]]:
        """Return the containers of the same state, and of the generators, as far as values can be put."""
        return {}

    def compute_losses(self, batches: Batches, until: int) -> None:
        """Record the losses of steps up to and including `until`. The steps are taken only if no loss can be
        computed otherwise."""
        self.train(batches, until)

    def prepare_load(self, step: int, filled: bool) -> None:
        """Prepare a new run for a load of a checkpoint that was saved after a step; a trainer does that
        itself. `filled`: its optimizer gets the state which DCP gives a fresh one."""
        return

    def leave_gradients(self, batches: Batches) -> None:
        """Compute the gradients of the next step without taking it, if a run can do that."""
        return

    @abstractmethod
    def forget(self, seed: int) -> None:
        """Replace the objects that a run makes itself, and reseed its generators."""

    def live_state(self) -> State:
        """Return the state of this rank, which later steps change."""
        parts = named_parts(self.model)
        state: State = {
            StatePart.model: snapshot_model(self.model, parts),
            StatePart.optimizer: snapshot_optimizer(self.model, self.optimizer, parts),
            **self.extra(),
        }
        if not self.optimizer.param_groups:
            del state[StatePart.optimizer]
        exclusions = self.exclusions
        if exclusions.generators != frozenset():
            state[StatePart.random] = snapshot_nested({"random": self.random.contents(exclusions.generators)})
        everything = {name: leaf for leaves in state.values() for name, leaf in leaves.items()}
        flags = snapshot_flags(self.model, self.optimizer, everything, not exclusions.leaves_gradients, parts)
        if attributes := self.attributes():
            state[StatePart.extra] = attributes
        return exclusions.comparable({**state, StatePart.flags: flags})

    def retained_state(self) -> State:
        """Return a copy of the state of this rank; large tensors become digests."""
        return {part: retained(leaves) for part, leaves in self.live_state().items()}

    def live_gradients(self) -> Leaves:
        """Return the gradients of this rank."""
        return snapshot_gradients(named_parts(self.model))

    def restorable(self, state: State) -> State:
        """Return a state without what the first step of a run makes."""
        made = self.made_by_first_step(state)
        return {
            part: {name: leaf for name, leaf in leaves.items() if name not in made.get(part, ())}
            for part, leaves in self.exclusions.comparable(state).items()
        }

    def made_by_first_step(self, state: State) -> dict[StatePart, Collection[Name]]:
        """Return the names of what the first step makes: hooks of the model, and the buffers that DDP
        overwrites on this rank."""
        return {
            StatePart.model: [(name,) for name in overwritten_buffers(self.model)],
            StatePart.flags: [HOOKS],
        }

    def as_saved(self, saved: State) -> State:
        """Return a state as the state dicts of the run have it."""
        return {part: leaves for part, leaves in saved.items() if part is not StatePart.flags}

    def drop_unneeded_generators(self, state: State) -> None:
        """Drop the generators from a state that are not compared."""
        if self.exclusions.generators is None:
            return
        kept: set[Name] = {("random", self.random.key, name) for name in self.exclusions.generators}
        if leaves := {name: leaf for name, leaf in state.pop(StatePart.random, {}).items() if name in kept}:
            state[StatePart.random] = leaves

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        """The parameters of the optimizer."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def compute_dtypes(self) -> set[torch.dtype]:
        """All dtypes that it computes in."""
        return {*self.exclusions.compute_dtypes, *(parameter.dtype for parameter in self.model.parameters())}


def has_gradient(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether one of these parameters has a gradient that is not zero on this rank."""
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    return any(bool(local_part(dense(gradient)).any()) for gradient in gradients)


@contextmanager
def noting_gradients(
    optimizers: Iterable[torch.optim.Optimizer], parameters: Callable[[], Iterable[nn.Parameter]]
) -> Iterator[list[bool]]:
    """Context manager around a step. It yields a list that gets, when an optimizer steps and at the end,
    whether one of the parameters has a gradient that is not zero."""
    had_gradient = list[bool]()
    with ExitStack() as hooks:
        for optimizer in optimizers:
            hook = optimizer.register_step_pre_hook(
                lambda *_: had_gradient.append(has_gradient(parameters()))
            )
            hooks.callback(hook.remove)
        yield had_gradient
    had_gradient.append(any(had_gradient) or has_gradient(parameters()))


CLIPPING = "clipping"
"""`GradientUse.by` of torch's functions that clip gradients."""


@dataclass(frozen=True)
class GradientUse:
    """A use of gradients in a step, by the ranks or by their twin.

    Args:
        by: the optimizer that steps on them, or that a function of torch clips them.
        gradients: by FQN, this rank's parts; of the twin, elements in float64.
        full: full gradients, from all ranks.
        sizes: the magnitudes of the twin's gradients, summed over the passes that accumulate.
    """

    by: str
    gradients: Mapping[str, torch.Tensor]
    full: Mapping[str, torch.Tensor] = field(default_factory=dict)
    sizes: Mapping[str, torch.Tensor] = field(default_factory=dict)


OnUse = Callable[[str, list[nn.Parameter]], None]
"""Is called before each use of gradients, with `GradientUse.by` and the parameters."""


def gradients_of(model: nn.Module, parameters: Iterable[nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return this rank's gradients of these parameters of a model, by FQN."""
    wanted = {id(parameter) for parameter in parameters}
    return {
        name: part.of(part.parameter.grad)
        for parts in parts_of_each(named_parts(model)).values()
        for name, part in parts.items()
        if part.parameter.grad is not None and id(part.parameter) in wanted
    }


def use_recorder(uses: list[GradientUse], model: nn.Module) -> OnUse:
    """Return a function that appends a copy of a model's gradients at each use of them."""

    def note(by: str, parameters: list[nn.Parameter]) -> None:
        gradients = gradients_of(model, parameters).items()
        uses.append(GradientUse(by, {name: gradient.detach().clone() for name, gradient in gradients}))

    return note


@contextmanager
def noting_uses(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[nn.Parameter], on_use: OnUse
) -> Iterator[None]:
    """Context manager: call `on_use` before an optimizer steps, and before torch clips gradients."""
    grouped = GROUP_TO_CLIP.value

    def clipping(tensors: Any, *args: Any, **options: Any) -> Any:
        clipped = {_place(gradient) for gradients in tensors for gradient in gradients}
        on_use(CLIPPING, [parameter for parameter in parameters if _place(parameter.grad) in clipped])
        return grouped(tensors, *args, **options)

    def stepping(number: int, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        if any(argument is not None for argument in (*args[1:], options.get("closure"))):
            raise Skip(
                "step: an optimizer's step has a closure; call backward() before it, and step() without one; "
                "if it needs one, use checkpointer=trainer"
            )
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        on_use(f"optimizer {number}" if len(optimizers) > 1 else "the optimizer", stepped)

    with ExitStack() as hooks:
        # All functions that clip call this one, however a module has imported them.
        hooks.enter_context(GROUP_TO_CLIP.patch(clipping))
        for number, optimizer in enumerate(optimizers):
            hooks.callback(optimizer.register_step_pre_hook(partial(stepping, number)).remove)
        yield


def _place(gradient: torch.Tensor | None) -> int | None:
    """Return a number that a gradient has in common with views of it, such as the local part of a DTensor."""
    if gradient is None:
        return None
    return id(gradient) if gradient.is_sparse else local_part(gradient).data_ptr()


def use_suffixes(uses: Sequence[GradientUse]) -> list[str]:
    """Return the words that follow the name of a gradient in each use; none in an only one."""
    if len(uses) == 1:
        return [""]
    all_by = [use.by for use in uses]
    names = []
    for number, by in enumerate(all_by):
        several = all_by.count(by) > 1
        names.append(f" before {by}" + (f", use {1 + all_by[:number].count(by)}" if several else ""))
    return names
