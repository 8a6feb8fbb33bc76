"""Save the full state in one safetensors file, without DCP."""

import json
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from dcpbench.checkpointers.torch_save import TorchSaveCheckpointer
from dcpbench.compare.stored import Stored, StoredChunk
from dcpbench.formats.audit import Manifest
from dcpbench.formats.safetensors_headers import safetensors_manifest
from dcpbench.records.files import file_lengths
from dcpbench.state.nested import packed, unpacked
from dcpbench.state.snapshot import flattened

_VALUES = "values"
"""Key of the header entry that lists the keys of values other than tensors."""


class SafetensorsCheckpointer(TorchSaveCheckpointer):
    """Rank 0 writes the state with flattened keys, and every rank reads the file. The format supports only
    tensors, and none that share memory, so each tensor is copied, and other values are stored as tensors of
    their bytes."""

    file = "state.safetensors"

    def _write(self, nested: dict[str, Any], file: BinaryIO) -> None:
        leaves = flattened(nested)
        values = [key for key, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)]
        tensors = {key: _tensor(leaf) for key, leaf in leaves.items()}
        file.write(save(tensors, {_VALUES: json.dumps(values)}))

    def _leaves(self, checkpoint_id: str) -> dict[str, Any]:
        leaves: dict[str, Any] = load_file(Path(checkpoint_id) / self.file)
        return leaves

    def read_tensor(self, checkpoint_id: str, key: str) -> torch.Tensor | None:
        with safe_open(Path(checkpoint_id) / self.file, framework="pt") as opened:
            is_tensor = key in opened.keys() and key not in json.loads(opened.metadata()[_VALUES])  # noqa: SIM118
            return opened.get_tensor(key) if is_tensor else None

    def _value(self, saved: Any, like: Any) -> Any:
        return unpacked(saved, like)

    def manifest(self, checkpoint_id: str) -> Manifest:
        return safetensors_manifest(Path(checkpoint_id), file_lengths(checkpoint_id))

    def stored(self, checkpoint_id: str) -> Stored:
        """Return readers of the byte ranges in the header."""
        manifest = self.manifest(checkpoint_id)
        path = Path(checkpoint_id) / self.file
        spans = {span.name: span for span in manifest.spans[self.file]}

        def read(key: str) -> torch.Tensor:
            entry, span = manifest.entries[key], spans[key]
            with path.open("rb") as file:
                file.seek(span.begin)
                data = bytearray(file.read(span.end - span.begin))
            dtype = getattr(torch, str(entry.dtype).removeprefix("torch."))
            assert entry.shape is not None
            return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)

        return {
            key: [StoredChunk(chunk.offsets, chunk.sizes, partial(read, key)) for chunk in entry.chunks]
            for key, entry in manifest.entries.items()
        }


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return packed(value)
