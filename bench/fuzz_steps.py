"""Operations of ranks on checkpoints, in plain torch: the steps of which a test draws sequences, and the head
of the script as which a sequence that fails is printed."""

import random
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

SHAPES = {"even": (8, 4), "odd": (7, 5), "thin": (1, 9), "flat": (3,), "none": (0, 4), "scalar": ()}
DTYPES = {"odd": torch.bfloat16, "flat": torch.int64}
PLACEMENTS = {"shard0": Shard(0), "shard1": Shard(1), "replicate": Replicate()}
SIZES = (1, 2, 4)
MESHES, GROUPS, PENDING = {}, {}, {}


def values(step, key):
    """The full tensor of a key at a step."""
    count = torch.Size(SHAPES[key]).numel()
    numbers = (torch.arange(count) + 7 * step + len(key)) % 251
    return numbers.to(DTYPES.get(key, torch.float32)).reshape(SHAPES[key])


def state(step, ranks, layout, seed=0):
    """A state dict with these keys, each as its layout says, in a drawn order."""
    made = {}
    for key in random.Random(seed).sample(sorted(layout), len(layout)):
        whole, how = values(step, key), layout[key]
        made[key] = whole
        if how != "plain":
            made[key] = distribute_tensor(whole, MESHES[ranks], [PLACEMENTS[how]], src_data_rank=None)
    return {"model": made, "step": step}


def prepare():
    """Once, on all ranks: a mesh and a second group for each number of them."""
    warnings.simplefilter("ignore")
    for ranks in SIZES:
        MESHES[ranks] = DeviceMesh("cpu", list(range(ranks)))
        GROUPS[ranks] = dist.new_group(list(range(ranks)))


def save(folder, step, ranks, layout, seed, options, way):
    """Save on the first ranks. An asynchronous save runs until `finish`; its source is overwritten."""
    if dist.get_rank() >= ranks:
        return
    saved, writer = state(step, ranks, layout, seed), FileSystemWriter(folder, **options)
    if way == "sync":
        dcp.save(saved, storage_writer=writer, process_group=MESHES[ranks].get_group())
        return
    PENDING[folder] = dcp.async_save(saved, storage_writer=writer, process_group=GROUPS[ranks])
    for value in saved["model"].values():
        (value.to_local() if isinstance(value, DTensor) else value).fill_(-1)


def finish(folder):
    """Wait for an asynchronous save."""
    if folder in PENDING:
        PENDING.pop(folder).result()


class Failing(FileSystemWriter):
    """Its disk is full on one rank."""

    def __init__(self, folder, full):
        super().__init__(folder)
        self.full = full

    def write_data(self, plan, planner):
        written = super().write_data(plan, planner)
        if self.full:
            raise OSError(28, "No space left on device")
        return written


def fail(folder, step, ranks, layout, full):
    """A save whose storage fails on the rank `full`; what it was told on this one."""
    if dist.get_rank() >= ranks:
        return None
    writer = Failing(folder, dist.get_rank() == full)
    try:
        dcp.save(state(step, ranks, layout), storage_writer=writer, process_group=MESHES[ranks].get_group())
    except CheckpointException as error:
        return type(error).__name__
    return "success"


def load(folder, ranks, layout):
    """Load the keys of a layout on the first ranks, and gather them: what came back, by key, on each rank; or
    the name of the exception."""
    if dist.get_rank() >= ranks:
        return None
    loaded = state(1000, ranks, layout)
    try:
        planner = DefaultLoadPlanner()
        dcp.load(loaded, checkpoint_id=folder, planner=planner, process_group=MESHES[ranks].get_group())
    except (CheckpointException, RuntimeError) as error:
        return type(error).__name__
    whole = {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in loaded["model"].items()
    }
    return {key: value.flatten().tolist() for key, value in whole.items()} | {"step": loaded["step"]}


def again(folder, to, ranks, layout, options):
    """Load a checkpoint in a layout, and save the loaded state elsewhere."""
    if dist.get_rank() >= ranks:
        return
    group, held = MESHES[ranks].get_group(), state(1000, ranks, layout)
    dcp.load(held, checkpoint_id=folder, process_group=group)
    dcp.save(held, storage_writer=FileSystemWriter(to, **options), process_group=group)


def delete(folder):
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()


def lay_out(folder, files):
    """The files that a save has left which was killed."""
    if dist.get_rank() == 0:
        Path(folder).mkdir()
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
    dist.barrier()


def call(name, arguments):
    """One step, by its name, on this rank."""
    return globals()[name](**arguments)
