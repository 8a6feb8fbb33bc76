"""Make the training of a run wrong: its backward pass, its optimizer steps, or its share of a batch."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any
from unittest import mock

from torch.nn.parallel import DistributedDataParallel

from dcpbench.config.mesh import dp_degree
from dcpbench.core.rank_report import NothingToInjectError
from dcpbench.verify.snapshot import local_part, named_parts, parts_of_each
from dcpbench.workloads.own_run import OwnRun
from dcpbench.workloads.run import Run


class WrongTraining:
    """A parallel run on this rank, with methods that make its training wrong from then on.

    Raises:
        NothingToInjectError: by any method: the run cannot be made wrong in this way.
    """

    def __init__(self, run: Run) -> None:
        if run.limits.why_no_twin or not isinstance(run, OwnRun):
            raise NothingToInjectError(f"no twin can show it: {run.limits.why_no_twin}")
        self._run = run

    @property
    def shares(self) -> int:
        """The number of ranks that share a batch."""
        if dp_degree(self._run.sizes) == 1:
            raise NothingToInjectError("no ranks share a batch")
        return dp_degree(self._run.sizes)

    def scale_gradients(self, factor: float, first_layer: bool) -> None:
        """Multiply gradients after each backward pass: all, or those of the first layer that has any."""

        @contextmanager
        def scaled() -> Iterator[None]:
            yield
            each = parts_of_each(named_parts(self._run.model)).values()
            named = [item for parts in each for item in parts.items() if item[1].parameter.requires_grad]
            layers = [name.rpartition(".")[0] for name, _ in named]
            for layer, (_, part) in zip(layers, named, strict=True):
                gradient = part.parameter.grad
                if gradient is not None and (layer == layers[0] or not first_layer):
                    local_part(part.of(gradient)).mul_(factor)

        self._during("backward", scaled)

    def keep_local_gradients(self) -> None:
        """Leave each rank the gradients of its share of a batch."""
        if self.shares:
            for module in self._run.model.modules():
                if isinstance(module, DistributedDataParallel):
                    module.require_backward_grad_sync = False

    def repeat_first_share(self) -> None:
        """Replace the second share of each batch by the first."""
        world, sizes = self._run.world, self._run.sizes
        if self.shares and world.dp_rank(sizes) == 1:
            first = copy(self._run)
            first.world = replace(world, rank=0)
            self._run.share_of = first.share_of  # type: ignore[method-assign]

    def step_with(self, key: str, factor: float) -> None:
        """Multiply a hyperparameter of every group during each step."""

        @contextmanager
        def changed() -> Iterator[None]:
            groups = [group for group in self._run.optimizer.param_groups if group.get(key)]
            if not groups:
                raise NothingToInjectError(f"no group has {key}")
            with ExitStack() as restored:
                for group in groups:
                    restored.enter_context(mock.patch.dict(group, {key: group[key] * factor}))
                yield

        self._during("step", changed)

    def _during(self, method: str, context: Callable[[], AbstractContextManager[None]]) -> None:
        """Call a method of the run's component, or its counterpart of a pipeline, in a context from now
        on."""
        owner: Any = self._run.component
        if method == "backward" and self._run.pipeline:
            owner, method = self._run.pipeline, "forward_backward"
        original = getattr(owner, method)

        def called(*arguments: Any) -> Any:
            with context():
                return original(*arguments)

        setattr(owner, method, called)
