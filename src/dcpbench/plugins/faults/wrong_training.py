"""Make the training of a run wrong: its backward pass, its optimizer steps, or its share of a batch."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from dcpbench.config.mesh import SHARE_DATA, dp_degree
from dcpbench.core.rank_report import NothingToInjectError
from dcpbench.verify.snapshot import local_part, named_parts, parts_of_each, plain_fqn
from dcpbench.workloads.optimizers import each_of
from dcpbench.workloads.own_run import OwnRun
from dcpbench.workloads.run import Run

_REDUCTIONS = {"all_reduce", "reduce_scatter_tensor", "reduce_scatter_single"}
"""Collectives with which FSDP averages: the second before torch 2.13, the third after."""


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

    def average_among(self, count: int) -> None:
        """Average gradients over only `count` neighbors. If shards are replicated, average them within a
        replica; with `count=1`, not at all."""
        run, mesh = self._run, self._run.world.mesh(self._run.sizes)
        names = [name for name in run.sizes if name not in SHARE_DATA]
        if mesh is None or count >= self.shares or (len(names) == 1 and self.shares % count):
            raise NothingToInjectError(f"a batch has no shares other than those of {count} ranks")
        uses_fsdp1 = any(isinstance(module, FullyShardedDataParallel) for module in run.model.modules())
        if uses_fsdp1 and len(names) > 1 and run.sizes[names[-1]] == 1:
            raise NothingToInjectError("FSDP1 never averages over replicas of a single shard")
        among = dict.fromkeys(names, 1)
        if count > 1:
            among[names[-1]] = count if len(names) == 1 else run.sizes[names[-1]]
        mean = _MeanAmong({mesh.get_group(name): number for name, number in among.items()})
        wrapped = [module for module in run.model.modules() if isinstance(module, DistributedDataParallel)]
        for module in wrapped:  # registered at the reducer, so that the module does not know of it
            dist._register_comm_hook(module.reducer, mesh.get_group(), mean.of_bucket)
        if not wrapped:
            self._during("backward", mean.patched)

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

    def step_without_decay_of(self, pattern: str, has_elements: bool) -> None:
        """Move the first parameter whose name matches a pattern to a group without decay during each step;
        with `has_elements`, the first of them that has elements on this rank."""
        run = self._run
        named = [(plain_fqn(run.model, name), parameter) for name, parameter in run.model.named_parameters()]
        decayed = [
            parameter
            for name, parameter in named
            if fnmatchcase(name, pattern) and self._group_of(parameter).get("weight_decay")
            if local_part(parameter).numel() or not has_elements
        ]
        if not decayed:
            raise NothingToInjectError(f"no parameter that matches {pattern} has weight decay")
        chosen = decayed[0]

        @contextmanager
        def without_decay() -> Iterator[None]:
            group = self._group_of(chosen)
            groups = next(
                optimizer.param_groups
                for optimizer in each_of(run.optimizer)
                if _has(optimizer.param_groups, group)
            )
            others = [parameter for parameter in group["params"] if parameter is not chosen]
            with mock.patch.dict(group, {"params": others}):
                groups.append({**group, "params": [chosen], "weight_decay": 0.0})
                yield
                groups.pop()

        self._during("step", without_decay)

    def _group_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the optimizer's group of a parameter; empty if it has none. Each load replaces the
        groups."""
        groups: list[dict[str, Any]] = self._run.optimizer.param_groups
        return next((group for group in groups if _has(group["params"], parameter)), {})

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


def _has(items: list[Any], item: Any) -> bool:
    return any(item is each for each in items)


class _MeanAmong:
    """Means over some ranks of a process group instead of all of them.

    Args:
        among: the number of neighbors that a mean covers, by group.
    """

    def __init__(self, among: dict[dist.ProcessGroup, int]) -> None:
        self._among = among

    def of_bucket(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
        """Average a bucket, as a communication hook of DDP."""
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(self._mean(bucket.buffer(), group))
        return done

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Context manager: make FSDP's collectives in these groups return these means."""
        with ExitStack() as restored:
            for name in _REDUCTIONS & vars(dist).keys():
                changed = partial(self._reduce, getattr(dist, name))
                restored.enter_context(mock.patch.object(dist, name, changed))
            yield

    def _reduce(self, original: Any, *arguments: Any, **options: Any) -> Any:
        """Reduce a tensor in place, or the `input` to this rank's part in `output`."""
        given = inspect.signature(original).bind(*arguments, **options).arguments
        group: Any = given.get("group")
        if group not in self._among:
            return original(*arguments, **options)
        times = 1 if given.get("op") == dist.ReduceOp.AVG else group.size()
        if "tensor" in given:
            given["tensor"].copy_(self._mean(given["tensor"], group) * times)
        else:
            part = (self._mean(given["input"], group) * times).chunk(group.size())[group.rank()]
            given["output"].copy_(part.view_as(given["output"]))
        return None

    def _mean(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor, group)
        count = self._among[group]
        first = group.rank() // count * count
        return torch.stack(parts[first : first + count]).mean(0)
