"""The twin of a run whose workload has `step`: it calls the same function on the same share, and at each use
of gradients it continues with the ranks' gradients in place of its own."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from dcpbench.verify.layout import called_modules
from dcpbench.verify.snapshot import Leaves, of_kind, retained, snapshot_model
from dcpbench.verify.whole_tensors import dense, magnitudes, real_elements
from dcpbench.workloads.batch import Batch
from dcpbench.workloads.optimizers import kept
from dcpbench.workloads.twin import Inexact, Pass, Twin, jitter_gradients, receive_buffers, state_of
from dcpbench.workloads.user_step import Use

_AFTER_USE = 16
"""The magnitude of a gradient that only torch's clipping has changed since its last use, as a multiple of it:
a norm of parts is rounded several times."""


@dataclass(frozen=True)
class UsedGradients:
    """The ranks' gradients at a use of them.

    Args:
        use: this rank's parts.
        full: full gradients.
    """

    use: Use
    full: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class UserStepTaken:
    """A step that the twin has taken.

    Args:
        loss: of this rank's share.
        passes: the twin's gradients at each use.
        buffers: after the step.
        alike: whether the twin has used gradients as the ranks have.
    """

    loss: float
    passes: list[Pass]
    buffers: Leaves
    alike: bool


class StepTwin(Twin):
    """A twin that calls `Workload.step`."""

    def taken(self, used: Sequence[UsedGradients]) -> UserStepTaken:
        """Take the step with the ranks' gradients."""
        with ExitStack() as hooks:
            for module in self.model.modules():
                hooks.callback(module.register_forward_hook(self._note_dtype).remove)
            return self._taken(self._batch, used)

    def passed_until(self, used: Sequence[UsedGradients], number: int) -> tuple[Pass, list[Pass]]:
        """Take the step again from its beginning, and undo its effects. Return the twin's gradients at use
        `number`, none if there is no such use, and no jittered ones."""
        with self._undone():
            self._restart()
            passes = self._taken(self._batch, used).passes
        return passes[number] if number < len(passes) else Pass(0.0, {}, {}, {}), []

    def jittered_steps(self, used: Sequence[UsedGradients]) -> list[UserStepTaken]:
        """Take steps with parameters and inputs that differ by a rounding, and undo their effects."""
        return [self._taken(batch, used) for batch in self._jittered()]

    def inexact_states(self, used: Sequence[UsedGradients], inexact: Inexact) -> list[Leaves]:
        """Return states after steps with slightly different gradients, if `inexact` needs them, and undo
        their effects."""
        states = []
        for number in range(inexact.repeats):
            others = [
                UsedGradients(one.use, {name: value.clone() for name, value in one.full.items()})
                for one in used
            ]
            for one in others:
                jitter_gradients([*one.full.values()], number)
            with self._undone():
                self._taken(self._batch, others)
                states.append(retained(state_of(self.run)))
        return states

    def loss_again(self) -> float:
        """Return the loss of the same batch in the present state."""
        with self._undone():
            return float(self.run.take_user_step(self._batch))

    def _taken(self, batch: Batch, used: Sequence[UsedGradients]) -> UserStepTaken:
        names = {value: name for name, value in self.parameters.items()}
        sizes: dict[str, torch.Tensor] = {}
        sums: dict[str, int] = {}
        passes: list[Pass] = []
        alike = True

        def add(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
            name, size = names[parameter], magnitudes(gradient)
            if parameter.grad is None or not bool(dense(parameter.grad).any()):
                sizes[name], sums[name] = size, 1
            else:
                sizes[name] = sizes.get(name, 0) + size
                sums[name] = sums.get(name, 1) + 1

        def use(by: str, parameters: list[nn.Parameter]) -> None:
            nonlocal alike
            number = len(passes)
            own = {names[one]: real_elements(dense(one.grad)) for one in parameters if one.grad is not None}
            size = {
                name: sums[name] * sizes[name] if name in sums else _AFTER_USE * value.abs()
                for name, value in own.items()
            }
            passes.append(Pass(0.0, own, size, {}))
            if number < len(used) and used[number].use.by == by:
                for one in parameters:
                    self._replace_gradient(one, names[one], used[number])
                    sums.pop(names[one], None)
            else:
                alike = False

        self.model.zero_grad()
        with ExitStack() as hooks:
            for one in names:
                if one.requires_grad:
                    hooks.callback(one.register_hook(lambda gradient, one=one: add(one, gradient)).remove)
            if group := self._group:
                for module in called_modules(self.model):
                    receive = module.register_forward_pre_hook(lambda one, _: receive_buffers(one, group))
                    hooks.callback(receive.remove)
            loss = float(self.run.take_user_step(batch, use))
        buffers = retained(of_kind("buffer", snapshot_model(self.model)))
        return UserStepTaken(loss, passes, buffers, alike and len(passes) == len(used))

    def _replace_gradient(self, parameter: nn.Parameter, name: str, used: UsedGradients) -> None:
        mine, full = used.use.gradients.get(name), used.full.get(name)
        if mine is not None and mine.is_sparse:
            parameter.grad = mine.clone()
        elif full is None:
            parameter.grad = None
        elif parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = full.view_as(parameter).to(parameter.device, copy=True)
        else:  # in place: torch's clipping already has it
            with torch.no_grad():
                parameter.grad.copy_(full.view_as(parameter))

    def _kept(self) -> Callable[[], None]:
        restore, restore_optimizers = super()._kept(), kept(self.run.optimizer, self.model)

        def restore_all() -> None:
            nonlocal restore_optimizers
            restore()
            restore_optimizers()
            # The next steps change what was restored.
            restore_optimizers = kept(self.run.optimizer, self.model)

        return restore_all
