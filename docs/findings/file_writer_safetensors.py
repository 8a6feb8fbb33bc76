"""FileSystemWriter with serialization_format=SAFETENSORS: who reads what it has written?

python file_writer_safetensors.py
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import SerializationFormat

STATES: dict[str, dict[str, Any]] = {
    "tensors": {"weight": torch.arange(4.0), "bias": torch.ones(2)},
    "tensors and a value": {"weight": torch.arange(4.0), "bias": torch.ones(2), "epoch": 7},
}


def by_dcp(reader: Any) -> dict[str, Any]:
    loaded = {"weight": torch.zeros(4), "bias": torch.zeros(2)}
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    return loaded


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "FileSystemReader": lambda folder: by_dcp(FileSystemReader(folder)),
    "HuggingFaceStorageReader": lambda folder: by_dcp(HuggingFaceStorageReader(str(folder))),
    "safetensors": lambda folder: load_file(folder / "__0_0.distcp"),
}

print(f"torch {torch.__version__}")
unread = 0
for name, state in STATES.items():
    with tempfile.TemporaryDirectory() as folder:
        writer = FileSystemWriter(folder, serialization_format=SerializationFormat.SAFETENSORS)
        dcp.save(state, storage_writer=writer, no_dist=True)
        print(f"  {name}: saved, files {sorted(path.name for path in Path(folder).iterdir())}")
        for reader, read in READERS.items():
            try:
                held = read(Path(folder))
                right = all(torch.equal(held[key], state[key]) for key in ("weight", "bias"))
                told = "right" if right else f"wrong: {held}"
            except BaseException as error:  # noqa: BLE001 - CheckpointException is no Exception
                text = str(error).strip().splitlines()[-1]
                told = f"refused: {text[:100]}"
            unread += told != "right"
            print(f"    read by {reader}: {told}")
sys.exit(bool(unread))
