"""Folders of safetensors, damaged in every way, and audited by their headers."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcpbench.cli.commands import main
from support.gloo_ranks import WORLD_SIZE, Ask

INDEX = "model.safetensors.index.json"
ONE, TWO = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
SHARDS = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]

Tensor = tuple[str, Sequence[int], int, int]
"""Dtype, shape, and start and end of the bytes of each tensor."""


def packed(tensors: dict[str, Any], data: int, extra: dict[str, str] | None = None) -> bytes:
    """Write a file with this header and number of bytes of data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(extra or {})}}
    for key, (dtype, shape, begin, end) in tensors.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def written(folder: Path) -> Path:
    """Write two files and an index, like a trainer."""
    folder.mkdir(parents=True)
    first = {"w": ("F32", [4, 6], 0, 96), "b": ("BF16", [4], 96, 104), "none": ("I64", [0, 3], 104, 104)}
    (folder / ONE).write_bytes(packed(first, 104))
    (folder / TWO).write_bytes(packed({"scale": ("F64", [], 0, 8)}, 8))
    listed = {"w": ONE, "b": ONE, "none": ONE, "scale": TWO}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 112}, "weight_map": listed}))
    return folder


def sharded(folder: Path, offsets: Sequence[Sequence[int]] = ((0, 0), (2, 0))) -> Path:
    """Write the files of DCP's HuggingFace storage writer for two ranks with half of `w` each."""
    folder.mkdir(parents=True)
    for name, at in zip(SHARDS, offsets, strict=True):
        info = json.dumps({"w": {"saved_offsets": at}})
        extra = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": info}
        (folder / name).write_bytes(packed({"w": ("F32", [2, 6], 0, 48)}, 48, extra))
    return folder


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], dict[str, Any]]:
    def looked_at(folder: Path) -> dict[str, Any]:
        status = main(["audit", "--json", str(folder)])
        (seen,) = json.loads(capsys.readouterr().out)
        assert status == {"complete": 0, "damaged": 1, "torn": 1, "none": 2}[seen["state"]]
        return seen

    return looked_at


def test_complete_checkpoints_pass(
    tmp_path: Path, look: Callable[[Path], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "whole")
    (folder / "config.json").write_text("{}")
    seen = look(folder)
    assert (seen["state"], seen["findings"], seen["beside"]) == ("complete", [], ["config.json"])
    chunk = {"offsets": [0, 0], "sizes": [4, 6], "file": ONE}
    assert seen["keys"]["w"] == {"dtype": "torch.float32", "shape": [4, 6], "chunks": [chunk]}
    assert main(["audit", str(folder)]) == 0
    output = capsys.readouterr().out
    assert "4 tensors with 29 elements, 0 values" in output
    assert "b      bfloat16  [4]          1" in output
    seen = look(sharded(tmp_path / "sharded"))
    assert (seen["state"], seen["findings"], seen["keys"]["w"]["shape"]) == ("complete", [], [4, 6])
    assert len(seen["keys"]["w"]["chunks"]) == 2
    assert main(["audit", "--newest", str(tmp_path / "whole")]) == 0
    assert capsys.readouterr().out == f"{folder}\n"


def with_header(name: str, tensors: dict[str, Any], data: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(packed(tensors, data))


def raw(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def listing(**listed: str) -> Callable[[Path], object]:
    """Write an index that also lists these files, or omits those with an empty value."""

    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] |= listed
        index["weight_map"] = {key: name for key, name in index["weight_map"].items() if name}
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def pipe(folder: Path) -> None:
    (folder / TWO).unlink()
    os.mkfifo(folder / TWO)


def linked(folder: Path) -> None:
    (folder / TWO).unlink()
    (folder / TWO).symlink_to("/dev/zero")


DEEP = b"[" * 100_000
DAMAGED = {
    "short": (lambda at: os.truncate(at / ONE, (at / ONE).stat().st_size - 1), "bytes; the metadata says"),
    "long": (lambda at: os.truncate(at / ONE, 4096), "is 4096 bytes; the metadata says"),
    "missing": (lambda at: (at / TWO).unlink(), "no such file; keys listed in it: 1"),
    "a number missing": (
        lambda at: [(at / name).unlink() for name in (TWO, INDEX)],
        f"{TWO}: no such file, though files are numbered up to 2",
    ),
    "a pipe": (pipe, "no such file"),
    "a device": (linked, "no such file"),
    "empty": (raw(TWO, b""), "its header has 0 of 0 bytes"),
    "header cut": (lambda at: os.truncate(at / ONE, 60), "its header has 52 of "),
    "header too long": (raw(TWO, b"\xff" * 64), "its header has 56 of "),
    "header no JSON": (raw(TWO, (4).to_bytes(8, "little") + b"\x80abc"), "not a safetensors file"),
    "header deep": (raw(TWO, len(DEEP).to_bytes(8, "little") + DEEP), "not a safetensors file"),
    "header a list": (raw(TWO, (2).to_bytes(8, "little") + b"[]"), "its header is not a mapping"),
    "a tensor without a shape": (raw(TWO, (8).to_bytes(8, "little") + b'{"w":{}}'), "'shape'"),
    "negative": (with_header(TWO, {"scale": ("F64", [-1], 0, 8)}, 8), "invalid shapes"),
    "before": (with_header(TWO, {"scale": ("F64", [], -8, 0)}, 8), "scale has the offsets [-8, 0]"),
    "no number": (with_header(TWO, {"scale": ("F64", [], "0", 8)}, 8), "scale has the offsets ['0', 8]"),
    "elements": (with_header(TWO, {"scale": ("F64", [2], 0, 8)}, 8), f"8 bytes in {TWO} for 2 elements"),
    "overlap": (
        with_header(TWO, {"scale": ("F64", [], 0, 8), "x": ("F64", [], 4, 12)}, 12),
        "belong to both scale and x",
    ),
    "a hole": (with_header(TWO, {"scale": ("F64", [], 8, 16)}, 16), "belong to no tensor"),
    "beyond": (with_header(TWO, {"scale": ("F64", [], 0, 8)}, 4), "bytes; the metadata says"),
    "another dtype": (
        with_header(TWO, {"w": ("F64", [4, 6], 0, 192)}, 192),
        f"w differs from the tensor of this name in {ONE}",
    ),
    "another shape": (with_header(TWO, {"w": ("F32", [24], 0, 96)}, 96), "w differs from the tensor"),
    "twice": (with_header(TWO, {"w": ("F32", [4, 6], 0, 96)}, 96), "[0, 0] and [0, 0] overlap"),
    "a key missing": (listing(bias=ONE), "bias: to be saved, but not in the checkpoint"),
    "a key too many": (listing(w=""), "w: stored, but not under any key"),
    "an index that is none": (raw(INDEX, b"{}"), "not an index of keys"),
    "an index of numbers": (listing(w=7), "not an index of keys"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_reported(case: str, tmp_path: Path, look: Callable[[Path], dict[str, Any]]) -> None:
    damage, message = DAMAGED[case]
    folder = written(tmp_path / "step-1")
    damage(folder)
    seen = look(folder)
    texts = [seen["because"], *(finding["text"] for finding in seen["findings"])]
    assert seen["state"] == "damaged"
    assert any(message in text.replace("(", "[").replace(")", "]") for text in texts), texts


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (((0, 0), (3, 0)), "have 24 of 30 elements"),
        (((0, 0), (1, 0)), "overlap"),
        (((0, 0), (2,)), "not a safetensors file"),
        (((0, 0), (2, "0")), "not a safetensors file"),
    ],
)
def test_mismatched_parts_of_ranks_are_reported(
    offsets: Any, message: str, tmp_path: Path, look: Callable[[Path], dict[str, Any]]
) -> None:
    seen = look(sharded(tmp_path / "step-1", offsets))
    assert (seen["state"], message in seen["because"]) == ("damaged", True), seen["because"]


def save_distributed(folder: str, sharded: bool) -> None:
    """Save a sharded model with DCP's own writer, to files of each rank or of one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3, dtype=torch.bfloat16))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = get_model_state_dict(fully_shard(model, mesh=mesh) if sharded else model)
    writer = HuggingFaceStorageWriter(folder, save_distributed=sharded)
    if sharded or dist.get_rank() == 0:
        dcp.save(state, storage_writer=writer, no_dist=not sharded)


@pytest.mark.parametrize("is_sharded", [True, False], ids=["files of each rank", "one with an index"])
def test_hugging_face_checkpoint_of_dcp_passes(
    is_sharded: bool, ask: Ask, tmp_path: Path, look: Callable[[Path], dict[str, Any]]
) -> None:
    folder = tmp_path / "step-1"
    ask(save_distributed, str(folder), is_sharded)
    seen = look(folder)
    assert (seen["state"], seen["findings"], seen["beside"]) == ("complete", [], [])
    theirs = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    shapes = {key: (str(one.properties.dtype), list(one.size)) for key, one in theirs.items()}
    assert {key: (one["dtype"], one["shape"]) for key, one in seen["keys"].items()} == shapes
    assert shapes["1.weight"] == ("torch.bfloat16", [3, 10])
    assert len(seen["keys"]["0.weight"]["chunks"]) == (WORLD_SIZE if is_sharded else 1)
    os.truncate(next(folder.glob("*.safetensors")), 500)
    assert look(folder)["state"] == "damaged"


def test_file_of_safetensors_passes(tmp_path: Path, look: Callable[[Path], dict[str, Any]]) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.uint16]
    tensors = {str(dtype): torch.zeros(3, 2, dtype=dtype) for dtype in dtypes}
    save_file({**tensors, "none": torch.zeros(0, 3)}, tmp_path / "model.safetensors")
    seen = look(tmp_path)
    assert (seen["state"], seen["findings"]) == ("complete", [])
    assert {seen["keys"][name]["dtype"] for name in tensors} == tensors.keys()


def test_incomplete_dcp_is_not_taken_for_safetensors(
    tmp_path: Path, look: Callable[[Path], dict[str, Any]]
) -> None:
    """A folder with an interrupted DCP save is not taken for a checkpoint of the safetensors in it."""
    folder = written(tmp_path / "step-1")
    (folder / "__0_0.distcp").touch()
    assert look(folder)["state"] == "torn"
    (tmp_path / "empty").mkdir()
    assert look(tmp_path / "empty")["state"] == "none"
