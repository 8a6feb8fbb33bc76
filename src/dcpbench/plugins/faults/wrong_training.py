"""How training is made wrong: in the backward pass of a run, in its optimizer steps, in its share of a
batch."""

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
from dcpbench.workloads.optimizers import InBackward, each_of
from dcpbench.workloads.training_run import TrainingRun

_REDUCE_SCATTER = ("reduce_scatter_tensor", "reduce_scatter_single")  # before torch 2.13, and since
_SUM = dist.ReduceOp.SUM


class WrongTraining:
    """A parallel run on this rank, with methods that make its training wrong from now on.

    Raises:
        NothingToInjectError: the run cannot be wrong in this way; from any of the methods.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        if run.why_no_twin:
            raise NothingToInjectError(f"no twin would show it: {run.why_no_twin}")
        if isinstance(run.optimizer, InBackward):
            raise NothingToInjectError("the optimizer steps in the backward pass")

    @property
    def shares(self) -> int:
        """How many ranks share a batch."""
        if dp_degree(self._run.sizes) == 1:
            raise NothingToInjectError("no ranks share a batch")
        return dp_degree(self._run.sizes)

    def scale_gradients(self, factor: float, first_layer: bool) -> None:
        """Multiply gradients after each backward pass: all, or those of the first layer that has any."""

        @contextmanager
        def scaled() -> Iterator[None]:
            yield
            each = parts_of_each(named_parts(self._run.model)).values()
            named = [one for parts in each for one in parts.items() if one[1].parameter.requires_grad]
            layers = [name.rpartition(".")[0] for name, _ in named]
            for layer, (_, part) in zip(layers, named, strict=True):
                gradient = part.parameter.grad
                if gradient is not None and (layer == layers[0] or not first_layer):
                    local_part(part.of(gradient)).mul_(factor)

        self._during("backward", scaled)

    def average_among(self, count: int) -> None:
        """Average gradients over so many neighbours alone; where shards are replicated, over the ranks of a
        replica, or each rank has its own."""
        run, mesh = self._run, self._run.world.mesh(self._run.sizes)
        names = [name for name in run.sizes if name not in SHARE_DATA]
        if mesh is None or count >= self.shares or (len(names) == 1 and self.shares % count):
            raise NothingToInjectError(f"a batch has no shares beside those of {count} ranks")
        of_fsdp1 = any(isinstance(one, FullyShardedDataParallel) for one in run.model.modules())
        if of_fsdp1 and len(names) > 1 and run.sizes[names[-1]] == 1:
            raise NothingToInjectError("FSDP1 never averages over replicas of a single shard")
        among = dict.fromkeys(names, 1)
        if count > 1:
            among[names[-1]] = count if len(names) == 1 else run.sizes[names[-1]]
        mean = _MeanAmong({mesh.get_group(name): number for name, number in among.items()})
        parallel = [one for one in run.model.modules() if isinstance(one, DistributedDataParallel)]
        for one in parallel:  # unknown to the module, which would not see itself what it then does
            dist._register_comm_hook(one.reducer, mesh.get_group(), mean.of_bucket)
        if not parallel:
            self._during("backward", mean.patched)

    def repeat_first_share(self) -> None:
        """Have the second share of each batch be the first."""
        world, sizes = self._run.world, self._run.sizes
        if self.shares and world.dp_rank(sizes) == 1:
            self._run.world = copy(world)
            self._run.world.share = replace(world, rank=0).share  # type: ignore[method-assign]

    def step_with(self, key: str, factor: float) -> None:
        """Multiply a hyperparameter of every group for the time of each step."""

        @contextmanager
        def otherwise() -> Iterator[None]:
            groups = [group for group in self._run.optimizer.param_groups if group.get(key)]
            if not groups:
                raise NothingToInjectError(f"no group has {key}")
            with ExitStack() as restored:
                for group in groups:
                    restored.enter_context(mock.patch.dict(group, {key: group[key] * factor}))
                yield

        self._during("step", otherwise)

    def step_without_decay_of(self, pattern: str, has_elements: bool) -> None:
        """Have a group without decay, for the time of each step, for the first parameter of a name like this;
        or for the first that `has_elements` on this rank."""
        run = self._run
        named = [(plain_fqn(run.model, name), one) for name, one in run.model.named_parameters()]
        decayed = [
            one
            for name, one in named
            if fnmatchcase(name, pattern) and self._group_of(one).get("weight_decay")
            if local_part(one).numel() or not has_elements
        ]
        if not decayed:
            raise NothingToInjectError(f"nothing that is called {pattern} has weight decay")
        chosen = decayed[0]

        @contextmanager
        def apart() -> Iterator[None]:
            group = self._group_of(chosen)
            groups = next(one.param_groups for one in each_of(run.optimizer) if _has(one.param_groups, group))
            alone = {**group, "params": [chosen], "weight_decay": 0.0}
            with mock.patch.dict(group, {"params": [one for one in group["params"] if one is not chosen]}):
                groups.append(alone)
                yield
                groups.pop()

        self._during("step", apart)

    def _group_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The optimizer's group of a parameter, another one after each load; empty if it has none."""
        groups: list[dict[str, Any]] = self._run.optimizer.param_groups
        return next((one for one in groups if _has(one["params"], parameter)), {})

    def _during(self, method: str, context: Callable[[], AbstractContextManager[None]]) -> None:
        """Have a method of the run's component, or what a pipeline has instead, called in such a context."""
        holder: Any = self._run.component
        if method == "backward" and self._run.pipeline:
            holder, method = self._run.pipeline, "forward_backward"
        honest = getattr(holder, method)

        def called(*arguments: Any) -> Any:
            with context():
                return honest(*arguments)

        setattr(holder, method, called)


def _has(several: list[Any], one: Any) -> bool:
    return any(one is each for each in several)


class _MeanAmong:
    """Means over some ranks of a process group, instead of all of them.

    Args:
        among: the groups, and over how many neighbours of each a mean is.
    """

    def __init__(self, among: dict[dist.ProcessGroup, int]) -> None:
        self._among = among

    def of_bucket(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
        """A communication hook of DDP."""
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(self._mean(bucket.buffer(), group))
        return done

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Context manager: FSDP's collectives in these groups return such means."""
        wrong: dict[str, Any] = dict.fromkeys(_REDUCE_SCATTER, self._reduce_scatter)
        wrong["all_reduce"] = self._all_reduce
        with ExitStack() as restored:
            for name in wrong.keys() & vars(dist).keys():
                changed = partial(wrong[name], getattr(dist, name))
                restored.enter_context(mock.patch.object(dist, name, changed))
            yield

    def _all_reduce(
        self, honest: Any, tensor: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if group not in self._among:
            return honest(tensor, op, group, async_op)
        tensor.copy_(self._mean(tensor, group) * self._times(op, group))
        return None

    def _reduce_scatter(
        self,
        honest: Any,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = _SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if group not in self._among:
            return honest(output, input, op, group, async_op)
        whole = self._mean(input, group) * self._times(op, group)
        output.copy_(whole.chunk(group.size())[group.rank()].view_as(output))
        return None

    def _mean(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor, group)
        count = self._among[group]
        first = group.rank() // count * count
        return torch.stack(parts[first : first + count]).mean(0)

    def _times(self, op: Any, group: dist.ProcessGroup) -> int:
        """How often a mean is in what this operation returns."""
        return 1 if op == dist.ReduceOp.AVG else group.size()
