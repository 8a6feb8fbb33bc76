"""HuggingFaceStorageWriter as it is by default, on two ranks.

torchrun --nproc-per-node 2 hf_writer_on_ranks.py
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
rank = dist.get_rank()
shared = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(shared)
mesh = init_device_mesh("cpu", (2,))
whole = {f"layer{number}": torch.full((2, 2), number + 1.0) for number in range(4)}
STATES = {
    "replicated": whole,
    "sharded": {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole.items()},
}
wrong = 0


def told(text: str) -> None:
    if rank == 0:
        print(text)


told(f"torch {torch.__version__}")
for name, state in STATES.items():
    folder = f"{shared[0]}/{name}"
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder))
    (path,) = Path(folder).glob("*.safetensors")
    held = {key: value.tolist() for key, value in sorted(load_file(path).items())}
    told(f"  {name}: the save reported success; {path.name} holds {held}")
    loaded = {key: torch.zeros_like(value) for key, value in state.items()}
    try:
        dcp.load(loaded, storage_reader=HuggingFaceStorageReader(folder))
        values = {
            key: (value.full_tensor() if name == "sharded" else value).tolist()
            for key, value in loaded.items()
        }
        came = f"loaded without a word: {values}"
        right = all(torch.equal(torch.tensor(values[key]), value) for key, value in whole.items())
    except dcp.CheckpointException as error:
        came, right = f"the load is refused: {str(error).strip().splitlines()[-1][:100]}", False
    wrong += not right
    told(f"    {came}")
dist.barrier()
dist.destroy_process_group()
sys.exit(bool(wrong))
