"""The parallel run whose training a fault makes wrong."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from dcpbench.config.mesh import dp_degree
from dcpbench.plugins.faults.expected import NothingToInjectError
from dcpbench.runs.own_run import OwnRun
from dcpbench.runs.run import Run
from dcpbench.state.snapshot import local_part, named_parts, parts_of_each


class WrongTraining:
    """A parallel run on this rank, with methods to make its training wrong from then on.

    Raises:
        NothingToInjectError: by any method: the run cannot be made wrong in this way.
    """

    def __init__(self, run: Run) -> None:
        if run.exclusions.why_no_twin or not isinstance(run, OwnRun):
            raise NothingToInjectError(f"no twin can show it: {run.exclusions.why_no_twin}")
        self.run = run

    @property
    def shares(self) -> int:
        """The number of ranks that share a batch."""
        if dp_degree(self.run.sizes) == 1:
            raise NothingToInjectError("no ranks share a batch")
        return dp_degree(self.run.sizes)

    def gradients(self) -> list[tuple[str, torch.Tensor | None]]:
        """Return this rank's parts of the gradients, each with the name of its layer."""
        parts_by_name = parts_of_each(named_parts(self.run.model)).values()
        named = [
            name_and_part
            for parts in parts_by_name
            for name_and_part in parts.items()
            if name_and_part[1].parameter.requires_grad
        ]
        gradients = [(name, part, part.parameter.grad) for name, part in named]
        return [
            (name.rpartition(".")[0], None if gradient is None else local_part(part.of(gradient)))
            for name, part, gradient in gradients
        ]

    def during(self, method: str, context: Callable[[], AbstractContextManager[None]]) -> None:
        """Call a method of the run's component, or its counterpart of a pipeline, in a context from now
        on."""
        owner: Any = self.run.component
        if method == "backward" and self.run.pipeline:
            owner, method = self.run.pipeline, "forward_backward"
        original = getattr(owner, method)

        def called(*arguments: Any) -> Any:
            with context():
                return original(*arguments)

        setattr(owner, method, called)
