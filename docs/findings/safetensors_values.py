"""HuggingFaceStorageWriter with a state in which a value is no tensor.

python safetensors_values.py
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

WAYS: dict[str, dict[str, bool]] = {
    "one file": {},
    "a file for each rank": {"save_distributed": True},
    "consolidated": {"save_distributed": True, "enable_consolidation": True},
}
STATES: dict[str, dict[str, Any]] = {
    "a tensor": {"weight": torch.arange(4.0)},
    "a tensor and a value": {"weight": torch.arange(4.0), "epoch": 7},
}


def told_by(call: Any) -> str:
    try:
        return str(call())
    except BaseException as error:  # noqa: BLE001 - CheckpointException is no Exception
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:100]}"


def save(folder: str, state: dict[str, Any], way: dict[str, bool]) -> str:
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, **way), no_dist=True)
    return "reported success"


def load(folder: str) -> list[float]:
    loaded = {"weight": torch.zeros(4)}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    return loaded["weight"].tolist()


def load_plainly(folder: str) -> list[float]:
    (path,) = Path(folder).glob("*.safetensors")
    return load_file(path)["weight"].tolist()


print(f"torch {torch.__version__}")
wrong = 0
for way, options in WAYS.items():
    for held, state in STATES.items():
        with tempfile.TemporaryDirectory() as folder:
            saved = told_by(lambda folder=folder, state=state, options=options: save(folder, state, options))
            print(f"  {way}, {held}: the save {saved}")
            if saved == "reported success":
                for reader, read in {"HuggingFaceStorageReader": load, "safetensors": load_plainly}.items():
                    told = told_by(lambda read=read, folder=folder: read(folder))
                    wrong += told != "[0.0, 1.0, 2.0, 3.0]"
                    print(f"    read by {reader}: {told}")
sys.exit(bool(wrong))
