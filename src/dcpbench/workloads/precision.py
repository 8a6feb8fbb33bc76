"""The dtypes that parallelisms compute and reduce in, and a plain model that computes in them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from dcpbench.config.groups import ParallelConfig
from dcpbench.verify.layout import is_dictionary
from dcpbench.workloads.parallelisms import fully_shard_options


def computes_in(config: ParallelConfig) -> frozenset[torch.dtype]:
    """Return the dtypes of mixed precision that a parallelism computes in."""
    policy = fully_shard_options(config).get("mp_policy", MixedPrecisionPolicy())
    return frozenset(filter(None, (policy.param_dtype, policy.reduce_dtype, policy.output_dtype)))


_REDUCED_IN: dict[Callable[..., Any], torch.dtype | None] = {
    default_hooks.allreduce_hook: None,
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}
"""The dtype in which DDP's communication hooks reduce gradients; None is the gradient's."""


def reduced_in(model: nn.Module, config: ParallelConfig) -> tuple[torch.dtype | None, str | None]:
    """Return the dtype in which gradients are reduced, None if it is the gradient's; and why they are not the
    mean of the ranks' gradients, if they are not."""
    for ddp in model.modules():
        for hook, _ in getattr(ddp, "_comm_hooks", ()) if isinstance(ddp, DistributedDataParallel) else ():
            if hook not in _REDUCED_IN:
                name = getattr(hook, "__qualname__", type(hook).__qualname__)
                return None, f"the communication hook {name} changes gradients"
            return _REDUCED_IN[hook], None
    policy = fully_shard_options(config).get("mp_policy")
    return (policy.reduce_dtype or policy.param_dtype if policy else None), None


class _CastAsFsdp(nn.Module):
    """A plain model that computes in the dtypes of FSDP's mixed precision: it casts parameters, inputs and
    output."""

    def __init__(self, model: nn.Module, policy: MixedPrecisionPolicy) -> None:
        super().__init__()
        self._model, self._policy = model, policy
        self._casts: dict[str, tuple[Any, torch.Tensor]] = {}

    def forward(self, *inputs: Any, **options: Any) -> Any:
        policy = self._policy
        parameters: dict[str, torch.Tensor] = dict(self._model.named_parameters())
        if dtype := policy.param_dtype:
            parameters = {name: self._parameter_in(dtype, name, one) for name, one in parameters.items()}
            if policy.cast_forward_inputs:
                inputs, options = _cast((inputs, options), dtype)
        output = torch.func.functional_call(self._model, parameters, inputs, options)
        return _cast(output, policy.output_dtype) if policy.output_dtype else output

    def _parameter_in(self, dtype: torch.dtype, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Cast a parameter once for all forward passes before it changes: so the gradients of several passes
        are summed in this dtype, as by FSDP, which casts no integers."""
        if not parameter.is_floating_point():
            return parameter
        state = parameter._version, parameter.requires_grad and torch.is_grad_enabled()
        if name not in self._casts or self._casts[name][0] != state:
            self._casts[name] = state, parameter.to(dtype)
        return self._casts[name][1]


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Cast as `fully_shard` does, which leaves unknown objects as they are."""
    return tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, values)


def cast_as_fsdp(model: nn.Module, config: ParallelConfig) -> nn.Module:
    """Return a plain model that computes in the dtypes of a parallelism."""
    policy = fully_shard_options(config).get("mp_policy")
    if policy and is_dictionary(model):
        return nn.ModuleDict({name: _CastAsFsdp(one, policy) for name, one in model.items()})
    return _CastAsFsdp(model, policy) if policy else model
