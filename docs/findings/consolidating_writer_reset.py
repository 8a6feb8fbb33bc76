"""HuggingFaceStorageWriter with enable_consolidation, given a checkpoint_id: where does it consolidate?

python consolidating_writer_reset.py
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


print(f"torch {torch.__version__}")
wrong = 0
with tempfile.TemporaryDirectory() as one:
    folder = Path(one)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
    for step in (1, 2):
        state = {"weight": torch.full((2,), float(step))}
        dcp.save(state, checkpoint_id=str(folder / f"step-{step}"), storage_writer=writer, no_dist=True)
    print(f"  files of two saves: {files_in(folder)}")
    for step in (1, 2):
        expected = sorted(["model-00001-of-00001.safetensors", "model.safetensors.index.json"])
        there = [name for name in files_in(folder / f"step-{step}") if not name.startswith("sharded/")]
        wrong += there != expected
        print(f"  step-{step} has {there}, where its consolidated file should be")
    loaded = {"weight": torch.zeros(2)}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    print(f"  the folder that the writer was made with holds {loaded['weight'].tolist()}")
sys.exit(bool(wrong))
