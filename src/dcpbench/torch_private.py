"""Private names of torch: the only file of dcpbench that has any, to be read when torch is upgraded.

Every name exists in torch 2.11, 2.13 and 2.15: `tests/test_torch_private.py` checks the installed version. A
name that a version lacks gets its versions here, in a comment. Nothing is imported before a name is used.
"""

import pkgutil
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn

T = TypeVar("T")


class Private(Generic[T]):
    """A private name of torch.

    Args:
        path: a module, or a name in a module or a class.
        why: dcpbench's reason for using it.
        patched: whether dcpbench replaces it for some time.
    """

    def __init__(self, path: str, why: str, patched: bool = False) -> None:
        self.path: Final = path
        self.why: Final = why
        self.patched: Final = patched
        self.name: Final = path.rpartition(".")[2]

    @property
    def owner(self) -> Any:
        """The module or class that has the name, imported at the first use."""
        return pkgutil.resolve_name(self.path.rpartition(".")[0])

    @property
    def value(self) -> T:
        """The present value of a name in a module or a class.

        Raises:
            AttributeError, ModuleNotFoundError: the installed torch does not have it.
        """
        value: T = pkgutil.resolve_name(self.path)
        return value

    def of(self, instance: Any) -> T:
        """Return this attribute of an instance.

        Raises:
            AttributeError: the instance does not have it.
        """
        value: T = getattr(instance, self.name)
        return value

    def patch(self, replacement: Any) -> AbstractContextManager[Any]:
        """Context manager: replace the value."""
        from unittest import mock  # it imports asyncio

        assert self.patched
        return mock.patch.object(self.owner, self.name, replacement)


# Patched: a change of what these do, or of who calls them, fails silently. The tests of their callers notice.

REBUILD_BUCKETS = Private[Any](
    "torch.distributed.Reducer._rebuild_buckets",
    "DDP rearranges its buckets before the second step, and would then sum in another order",
    patched=True,
)
DEFAULT_GROUP_OF_DDP = Private[Any](
    "torch.nn.parallel.distributed._get_default_group",
    "DDP can be copied only if its process group is the default one",
    patched=True,
)
RUN_BACKWARD = Private[Any](
    "torch.autograd._engine_run_backward",
    "every backward pass calls it, with `create_graph`",
    patched=True,
)
GROUP_TO_CLIP = Private[Any](
    "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype",
    "every function that clips gradients calls it first, however a module has imported that",
    patched=True,
)
LOADER_ITERATOR = Private[Any](
    "torch.utils.data.dataloader._BaseDataLoaderIter",
    "every iterator of a `DataLoader` is one: its `__next__`, which is replaced, shows where epochs end",
    patched=True,
)
NUM_YIELDED = Private[int](
    "torch.utils.data.dataloader._BaseDataLoaderIter._num_yielded", "it shows the last batch of an epoch"
)

# Modules and parameters

BUFFERS: Private["dict[str, torch.Tensor | None]"] = Private(
    "torch.nn.Module._buffers", "`named_buffers` does not show which are saved"
)
NON_PERSISTENT = Private[set[str]]("torch.nn.Module._non_persistent_buffers_set", BUFFERS.why)
CHILDREN: Private["Mapping[str, nn.Module | None]"] = Private(
    "torch.nn.Module._modules", "`named_children` leaves out repeated modules"
)
VERSION = Private[int]("torch.Tensor._version", "it shows that a parameter has changed since it was cast")
INDICES = Private[Any]("torch.Tensor._indices", "`indices` refuses sparse gradients with a row several times")
VALUES = Private[Any]("torch.Tensor._values", INDICES.why)
HOOKS_OF_TENSORS = (
    Private[Any]("torch.Tensor._backward_hooks", "torch lists the hooks of a tensor nowhere else"),
    Private[Any]("torch.Tensor._post_accumulate_grad_hooks", "as above"),
)
HOOKS_AFTER_STEPS = Private[dict[int, Any]](
    "torch.optim.Optimizer._optimizer_step_post_hooks", "an injected fault removes one"
)
GLOBAL_HOOKS = "_global_"
"""Prefix of the dictionaries of global hooks in `torch.nn.modules.module` and `torch.optim.optimizer`."""
PRIVATE_MODULES = "torch._"
"""Prefix of the modules that torch's own hooks are written in."""
STORAGE_DTYPE: Private["torch.dtype"] = Private(
    "torch.FloatStorage._dtype", "the dtype of a tensor in a file of `torch.save`"
)

# Wrappers of modules

ORIGINAL_MODULE = Private[Any](
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod", "the part of a name that `torch.compile` adds"
)
FSDP_WRAPPED = Private[str](
    "torch.distributed.fsdp._common_utils.FSDP_WRAPPED_MODULE", "the part of a name that FSDP1 adds"
)
CHECKPOINT_WRAPPED = Private[str](
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE",
    "the part of a name that activation checkpointing adds",
)
CHECKPOINT_WRAPPER = Private[Any](
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper",
    "torch's only module for activation checkpointing",
)
IS_WRAPPER_SUBCLASS = Private[Any](
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass", "it shows tensors that consist of others"
)

# DTensor, FSDP1, DDP and process groups

LOCAL_TENSOR: Private["torch.Tensor"] = Private(
    "torch.distributed.tensor.DTensor._local_tensor",
    "`to_local` returns a separate view, and needs the gradient mode changed",
)
LOCAL_SHAPE_AND_OFFSET = Private[Any](
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset", "the place of a shard"
)
FLATTEN_MESH = Private[Any](
    "torch.distributed.device_mesh.DeviceMesh._flatten", "expert parallelism shards over two dimensions"
)
FLAT_PARAMETER = Private[str](
    "torch.distributed.fsdp._unshard_param_utils.FLAT_PARAM", "the name of FSDP1's flat parameter"
)
FLAT_HANDLE = Private[Any](
    "torch.distributed.fsdp._common_utils._FSDPState._handle", "the way to FSDP1's flat parameter"
)
USE_ORIG_PARAMS = Private[bool](
    "torch.distributed.fsdp._flat_param.FlatParamHandle._use_orig_params", "whether it has views of its parts"
)
_PARTS = "nothing public describes the parts of a flat parameter; see the docstring of `FlatParameter`"
FLAT_PARAMETERS = Private[Any]("torch.distributed.fsdp._flat_param.FlatParameter._params", _PARTS)
FLAT_COUNT = Private[int]("torch.distributed.fsdp._flat_param.FlatParameter._num_params", _PARTS)
FLAT_NAMES = Private[Any]("torch.distributed.fsdp._flat_param.FlatParameter._fqns", _PARTS)
FLAT_SHAPES = Private[Any]("torch.distributed.fsdp._flat_param.FlatParameter._shapes", _PARTS)
FLAT_STRIDES = Private[Any]("torch.distributed.fsdp._flat_param.FlatParameter._strides", _PARTS)
FLAT_CONTIGUITIES = Private[Any]("torch.distributed.fsdp._flat_param.FlatParameter._contiguities", _PARTS)
FLAT_SHARDS = Private[Any]("torch.distributed.fsdp._flat_param.FlatParameter._shard_param_infos", _PARTS)
FLAT_EXTENSIONS = Private[Any]("torch.distributed.fsdp._flat_param.FlatParameter._param_extensions", _PARTS)
FLAT_TIED = Private[Any]("torch.distributed.fsdp._flat_param.FlatParameter._shared_param_infos", _PARTS)
CHECK_REDUCED = Private[Any](
    "torch.distributed.Reducer._check_reducer_finalized", "DDP reports parameters without a gradient there"
)
COMMUNICATION_HOOKS = Private[Any](
    "torch.nn.parallel.DistributedDataParallel._comm_hooks", "they decide the dtype of DDP's reduction"
)
IGNORED_BY_DDP = Private[Any](
    "torch.nn.parallel.DistributedDataParallel._ddp_params_and_buffers_to_ignore",
    "torch's only way to have DDP ignore parameters, which differ between ranks",
)
GATHER_WITH_GRADIENT = Private[Any](
    "torch.distributed._functional_collectives.all_gather_tensor_autograd", "expert parallelism needs it"
)
SCATTER_WITH_GRADIENT = Private[Any](
    "torch.distributed._functional_collectives.reduce_scatter_tensor_autograd", GATHER_WITH_GRADIENT.why
)
SET_TIMEOUT = Private[Any](
    "torch.distributed.distributed_c10d._set_pg_timeout", "`init_device_mesh` takes no timeout"
)
PROCESS_GROUPS = Private[Any]("torch.distributed.distributed_c10d._world", "it lists the process groups")
FAKE_STORE = Private[Any](
    "torch.testing._internal.distributed.fake_pg.FakeStore", "a process group in which no other rank exists"
)

# Checkpoints

UPLOADER = Private[Any](
    "torch.distributed.checkpoint._async_process_executor._CHECKPOINT_PROCESS",
    "DCP's process for uploads stays, and later saves use it",
    patched=True,
)
UPLOADER_PROCESS = Private[Any](
    "torch.distributed.checkpoint._async_process_executor._AsyncCheckpointProcess._save_process",
    "it can only be waited for",
)
CACHED_PLANS = "_cached"
"""Prefix of the attributes of `SavePlanner` in which DCP keeps plans between saves."""
LOAD_KEYS = Private[Any](
    "torch.distributed.checkpoint.state_dict_loader._load_state_dict_from_keys",
    "torch's only way to read everything below a key without a template",
)
FSSPEC_READER = Private[Any](
    "torch.distributed.checkpoint._fsspec_filesystem.FsspecReader", "it lies in a private module"
)
FSSPEC_WRITER = Private[Any](
    "torch.distributed.checkpoint._fsspec_filesystem.FsspecWriter", FSSPEC_READER.why
)
SHARDED_TENSOR = Private[type]("torch.distributed._shard.sharded_tensor.ShardedTensor", FSSPEC_READER.why)

# Keys of state dicts

GROWTH_TRACKER = Private[Any]("torch.amp.GradScaler._growth_tracker", "a value that no state can have")
SCALE_FUNCTION = Private[Any](
    "torch.optim.lr_scheduler.CyclicLR._scale_fn_custom", "None, unless the user gave an object"
)
SCHEDULER_BOOKKEEPING = tuple(
    Private[Any](f"torch.optim.lr_scheduler.LRScheduler.{name}", "no training depends on it")
    for name in ("_step_count", "_get_lr_called_within_step", "_is_initial", "_initial_step")
)

# The process and the compiler

FUNCTION_MODES = Private[Any]("torch.overrides._len_torch_function_stack", "a save may leave a mode behind")
DISPATCH_MODES = Private[Any]("torch.utils._python_dispatch._len_torch_dispatch_stack", FUNCTION_MODES.why)
PYTREE = Private[Any]("torch.utils._pytree", "torch has no public pytrees")
DYNAMO = Private[Any]("torch._dynamo", "agents import it once for all ranks")
DYNAMO_COUNTERS = Private[Any]("torch._dynamo.utils.counters", "whether the model was compiled")
GRAPH_BREAKS = Private[Any]("torch._dynamo.utils.graph_break_reasons", "where a graph was broken, and why")
INDUCTOR_CONFIG = Private[Any]("torch._inductor.config", "its kernels are deterministic if asked for")
FUNCTORCH_CONFIG = Private[Any](
    "torch._functorch.config", "with its memory budget, backward passes draw again"
)
COMPILER_MODULES = (
    Private[Any]("torch._dynamo.backends.inductor", "a rank would import it for its first graph"),
    Private[Any]("torch._functorch.aot_autograd", "as above"),
    Private[Any]("torch._inductor.codegen.cpp_wrapper_cpu", "as above"),
    Private[Any]("torch._inductor.compile_fx", "as above"),
)
VECTOR_INSTRUCTIONS = Private[Any](
    "torch._inductor.cpu_vec_isa.pick_vec_isa", "it takes two seconds, once per process"
)
TORCH_KEY = Private[Any]("torch._inductor.codecache.torch_key", "it hashes torch's sources, once per process")
TAG_GENERATIONS = Private[Any](
    "torch._dynamo.mutation_guard.install_generation_tagging_init",
    "the first graph of a rank would patch nn.Module",
)
