"""HuggingFaceStorageWriter with enable_consolidation: a tensor without dimensions.

python consolidated_scalars.py
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

STATES = {
    "floats": {"weight": torch.arange(1.0, 4.0), "logit_scale": torch.tensor(2.6593)},
    "floats and an integer": {"weight": torch.arange(1.0, 4.0), "seen": torch.tensor([7])},
}


def read_by_dcp(folder: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    loaded = {name: torch.full_like(value, -1) for name, value in state.items()}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    return loaded


print(f"torch {torch.__version__}")
wrong = 0
for name, state in STATES.items():
    with tempfile.TemporaryDirectory() as folder:
        writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
        try:
            dcp.save(state, storage_writer=writer, no_dist=True)
        except BaseException as error:  # noqa: BLE001 - CheckpointException is no Exception
            wrong += 1
            print(f"  {name}: the save raises {str(error).strip().splitlines()[-1][:110]}")
            continue
        (path,) = Path(folder).glob("*.safetensors")
        (rank_0,) = Path(folder, "sharded").glob("*.safetensors")
        print(f"  {name}: the save reported success")
        for what, held in {
            "saved": state,
            "the rank's file": load_file(rank_0),
            "the consolidated file": load_file(path),
            "loaded by DCP": read_by_dcp(folder, state),
        }.items():
            same = all(torch.equal(held[key], value) for key, value in state.items())
            wrong += not same
            values = {key: value.tolist() for key, value in sorted(held.items())}
            print(f"    {what}: {values}{'' if same else ', which is wrong'}")
sys.exit(bool(wrong))
