"""Checkpoints of plain `dcp.save`, damaged in every way. Damage is reported."""

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from dcpbench.cli.commands import main
from dcpbench.formats import on_disk
from dcpbench.formats.dcp_metadata import foreign_manifest, manifest_of
from dcpbench.records.files import file_lengths
from support.commands import python
from support.gloo_ranks import WORLD_SIZE, Ask

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)


def save(folder: Path) -> None:
    """Checkpoints of one process without a process group."""
    tensors = {f"of {dtype}": torch.zeros(2, 3, dtype=dtype) for dtype in DTYPES}
    state = {"model": {"weight": torch.rand(4, 6), **tensors}, "epoch": 7, "empty": torch.rand(0, 3)}
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=folder, no_dist=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step-1"
    save(folder)
    return folder


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    folder = tmp_path / "step-1"
    folder.mkdir()
    for item in saved.iterdir():
        (folder / item.name).write_bytes(item.read_bytes())
    return folder


def looked_at(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict]]:
    status = main(["audit", "--json", *map(str, words)])
    return status, json.loads(capsys.readouterr().out)


def test_complete_checkpoint_passes(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, (seen,) = looked_at(checkpoint, capsys=capsys)
    assert (status, seen["state"], seen["because"], seen["findings"]) == (0, "complete", None, [])
    assert seen["bytes"] == sum(item.stat().st_size for item in checkpoint.iterdir())
    weight = seen["keys"]["model.weight"]
    chunk = {"offsets": [0, 0], "sizes": [4, 6], "file": "__0_0.distcp"}
    assert weight == {"dtype": "torch.float32", "shape": [4, 6], "chunks": [chunk]}
    assert [seen["keys"][f"model.of {dtype}"]["dtype"] for dtype in DTYPES] == list(map(str, DTYPES))
    assert seen["keys"]["epoch"] == {
        "dtype": None,
        "shape": None,
        "chunks": [{"offsets": [], "sizes": [], "file": "__0_0.distcp"}],
    }
    assert main(["audit", str(checkpoint)]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{checkpoint}: complete\n")
    assert "8 tensors with 60 elements, 1 value\n" in output
    assert "model.of torch.bfloat16       bfloat16       [2, 3]       1" in output


def test_metadata_is_read_like_torch_does(saved: Path) -> None:
    found = file_lengths(saved)
    assert foreign_manifest(saved, found) == manifest_of(FileSystemReader(saved).read_metadata(), found)


def test_audit_does_not_import_torch(saved: Path) -> None:
    ended = python("-X", "importtime", "-m", "dcpbench", "audit", str(saved), check=True)
    assert "| torch\n" not in ended.stderr
    assert "| pandas\n" not in ended.stderr


def rewritten(change: Callable[[Metadata], object]) -> Callable[[Path], None]:
    """Change the content of `.metadata`."""

    def damage(folder: Path) -> None:
        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))

    return damage


def chunked(*chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Path], None]:
    """`model.weight` in these chunks (offsets, sizes), all of them stored."""

    def change(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["model.weight"]
        place = metadata.storage_data.pop(MetadataIndex("model.weight", (0, 0)))
        entry.chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in chunks]
        for at, _ in chunks:
            metadata.storage_data[MetadataIndex("model.weight", at)] = place

    return rewritten(change)


def moved(by: int | None) -> Callable[[Metadata], None]:
    """Move the second place in the file to the front, or to the start of the first."""

    def change(metadata: Metadata) -> None:
        one, other = sorted(metadata.storage_data.values(), key=lambda place: place.offset)[:2]
        other.offset = one.offset if by is None else other.offset + by

    return change


def cut(name: str, left: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        os.truncate(folder / name, int((folder / name).stat().st_size * left))

    return damage


def removed(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**42)


DATA, METADATA = "__0_0.distcp", ".metadata"
DAMAGED = {
    "data short": (cut(DATA, 0.5), "damaged", "bytes; the metadata says"),
    "data missing": (removed(DATA), "damaged", "no such file"),
    "data a pipe": (replaced(DATA, os.mkfifo), "damaged", "no such file"),
    "data a folder": (replaced(DATA, Path.mkdir), "damaged", "no such file"),
    "data huge": (replaced(DATA, sparse), "damaged", "is 4398046511104 bytes; the metadata says"),
    "no metadata": (removed(METADATA), "torn", "its save did not finish"),
    "unfinished metadata": (lambda at: (at / METADATA).rename(at / ".metadata.tmp"), "torn", "not finish"),
    "nothing": (removed(METADATA, DATA), "none", "no DCP or safetensors checkpoint"),
    "metadata short": (cut(METADATA, 0.9), "damaged", ".metadata: not written by DCP"),
    "metadata empty": (cut(METADATA, 0), "damaged", "EOFError"),
    "metadata a pipe": (replaced(METADATA, os.mkfifo), "damaged", "it is not a regular file"),
    "metadata a folder": (replaced(METADATA, Path.mkdir), "damaged", "Is a directory"),
    "metadata huge": (replaced(METADATA, sparse), "damaged", "bytes are more than"),
    "metadata a loop": (replaced(METADATA, lambda at: at.symlink_to(at)), "damaged", "cannot be read"),
    "metadata nowhere": (replaced(METADATA, lambda at: at.symlink_to("/nowhere")), "damaged", "No such file"),
    "metadata a device": (
        replaced(METADATA, lambda at: at.symlink_to("/dev/zero")),
        "damaged",
        "regular file",
    ),
    "metadata text": (lambda at: (at / METADATA).write_text("hello"), "damaged", "not written by DCP"),
    "metadata a list": (lambda at: (at / METADATA).write_bytes(pickle.dumps([1])), "damaged", "no metadata"),
    "chunks overlap": (chunked(((0, 0), (3, 6)), ((2, 0), (2, 6))), "damaged", "[0, 0] and [2, 0] overlap"),
    "a column twice": (chunked(((0, 0), (4, 4)), ((0, 3), (4, 3))), "damaged", "overlap"),
    "a hole": (chunked(((0, 0), (2, 6)), ((3, 0), (1, 6))), "damaged", "have 18 of 24 elements"),
    "beyond": (chunked(((0, 0), (4, 7))), "damaged", "reaches beyond"),
    "other dimensions": (chunked(((0,), (24,))), "damaged", "invalid shapes"),
    "negative": (chunked(((0, 0), (4, -6))), "damaged", "invalid shapes"),
    "bytes of two": (rewritten(moved(-8)), "damaged", "belong to both"),
    "bytes twice": (rewritten(moved(None)), "damaged", "belong to both"),
    "0 bytes": (
        rewritten(lambda of: setattr(of.storage_data[MetadataIndex("model.weight", (0, 0))], "length", 0)),
        "damaged",
        "0 bytes in __0_0.distcp for 24 elements of torch.float32",
    ),
    "not stored": (
        rewritten(lambda of: of.storage_data.pop(MetadataIndex("model.weight", (0, 0)))),
        "damaged",
        "nothing is stored for the chunk at [0, 0]",
    ),
    "no key": (
        rewritten(lambda of: of.state_dict_metadata.pop("model.weight")),
        "damaged",
        "stored, but not under any key",
    ),
    "key a number": (
        rewritten(lambda of: of.state_dict_metadata.update({7: BytesStorageMetadata()})),
        "damaged",
        "not written by DCP",
    ),
    "no storage": (rewritten(lambda of: setattr(of, "storage_data", None)), "damaged", "nothing is stored"),
    "no places": (
        rewritten(lambda of: setattr(of, "storage_data", [1])),
        "damaged",
        "not written by DCP",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_reported(case: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, state, message = DAMAGED[case]
    damage(checkpoint)
    status, (seen,) = looked_at(checkpoint, capsys=capsys)
    assert (status, seen["state"]) == ({"torn": 1, "damaged": 1, "none": 2}[state], state)
    assert message in seen["because"].replace("(", "[").replace(")", "]")
    assert main(["audit", str(checkpoint)]) == status
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{checkpoint}: {seen['because'] if state == 'none' else state}")
    assert message in shown.out.replace("(", "[").replace(")", "]")
    assert shown.err == ""


def test_names_with_control_characters_are_escaped(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / os.fsdecode(b"\xff\x1b[31m")).write_text("stray")
    rewritten(lambda of: of.state_dict_metadata.update({"\x1b]0;title\x07\ud800": BytesStorageMetadata()}))(
        checkpoint
    )
    assert main(["audit", str(checkpoint)]) == 1
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert r"\x1b]0;title\x07" in said.out
    assert main(["audit", "--json", str(checkpoint)]) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_other_files_are_listed_separately(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "trainer").mkdir()
    (checkpoint / "trainer" / "config.json").write_text("{}")
    status, (seen,) = looked_at(checkpoint, capsys=capsys)
    assert (status, seen["state"], seen["beside"]) == (0, "complete", ["trainer/config.json"])
    assert main(["audit", str(checkpoint)]) == 0
    assert "\n  2 B in 1 unreferenced file: trainer/config.json\n" in capsys.readouterr().out


@pytest.mark.slow
def test_tensor_with_many_chunks_is_audited_quickly(tmp_path: Path) -> None:
    """20,000 chunks are not all compared with each other."""
    rows = 20_000
    chunks = [ChunkStorageMetadata(torch.Size((row, 0)), torch.Size((1, 8))) for row in range(rows)]
    save(tmp_path)
    metadata = FileSystemReader(tmp_path).read_metadata()
    weight = metadata.state_dict_metadata["model.weight"]
    place = metadata.storage_data[MetadataIndex("model.weight", (0, 0))]
    metadata.state_dict_metadata = {
        "w": TensorStorageMetadata(weight.properties, torch.Size((rows, 8)), chunks)
    }
    metadata.storage_data = {MetadataIndex("w", (row, 0)): place for row in range(rows)}
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    found = [one for one in on_disk.audited(tmp_path).findings if one.name == "w"]
    assert found == []


def test_several_checkpoints_are_audited_at_once(
    checkpoint: Path, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut(DATA, 0.5)(checkpoint)
    status, seen = looked_at(saved, checkpoint, capsys=capsys)
    assert (status, [one["state"] for one in seen]) == (1, ["complete", "damaged"])
    assert main(["audit", str(saved), str(checkpoint), "/nowhere"]) == 2
    output = capsys.readouterr().out
    assert f"{saved}: complete" in output.replace("\n", "")
    assert "chunks" not in output, "with several, only their states are printed"
    assert main(["audit", str(saved)]) == 0
    assert "chunks" in capsys.readouterr().out


def save_sharded(folder: str, of_pairs: bool, alone: bool = False) -> int:
    """Save a model and its optimizer, sharded over all ranks or over the first two, on each rank; the number
    of ranks that saved. `alone` is each rank for itself, without collectives."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    whole = init_device_mesh(
        "cpu", (2, 2) if of_pairs else (WORLD_SIZE,), mesh_dim_names=("a", "b")[: 1 + of_pairs]
    )
    mesh = whole["b"] if of_pairs else whole
    if of_pairs:
        wrapped = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), process_group=mesh.get_group(), use_orig_params=True
        )
    else:
        wrapped = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(wrapped.parameters())
    wrapped(torch.rand(4, 6)).sum().backward()
    optimizer.step()
    states = dict(zip(("model", "optimizer"), get_state_dict(wrapped, optimizer), strict=True))
    if of_pairs and dist.get_rank() >= 2:
        return mesh.size()
    group = mesh.get_group() if of_pairs else None
    dcp.save(states, checkpoint_id=folder, process_group=group, use_collectives=not alone)
    return mesh.size()


@pytest.mark.parametrize("of_pairs", [True, False], ids=["FSDP1 on two ranks", "FSDP2 on four"])
def test_sharded_checkpoint_passes(
    of_pairs: bool, ask: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ask(save_sharded, str(tmp_path / "ck"), of_pairs)
    status, (seen,) = looked_at(tmp_path / "ck", capsys=capsys)
    assert (status, seen["findings"]) == (0, [])
    assert len(seen["keys"]["model.0.weight"]["chunks"]) == sizes[0]
    assert seen["keys"]["optimizer.state.0.weight.exp_avg"]["shape"] == [10, 6]
    one = next(path for path in (tmp_path / "ck").glob("*.distcp"))
    os.truncate(one, one.stat().st_size - 1)
    assert looked_at(tmp_path / "ck", capsys=capsys)[0] == 1


def test_save_without_collectives_needs_all_ranks(
    ask: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without collectives each rank has separate metadata for its chunks. Only all of them together are
    complete."""
    ask(save_sharded, str(tmp_path / "ck"), False, True)
    status, (seen,) = looked_at(tmp_path / "ck", capsys=capsys)
    assert (status, seen["state"], seen["beside"]) == (0, "complete", [])
    chunks = seen["keys"]["model.0.weight"]["chunks"]
    assert sorted(chunk["offsets"][0] for chunk in chunks) == [0, 3, 6, 9]
    assert len(seen["keys"]["optimizer.param_groups.0.lr"]["chunks"]) == 1
    for name in ("__3.metadata", "__3_0.distcp"):  # no file shows how many ranks there were
        (tmp_path / "ck" / name).unlink()
    status, (seen,) = looked_at(tmp_path / "ck", capsys=capsys)
    assert (status, seen["state"]) == (1, "torn")
    assert {one["name"] for one in seen["findings"]} >= {"model.0.weight", "optimizer.state.0.weight.exp_avg"}


def save_replicated(folder: str) -> None:
    """Save the same tensors on each rank separately."""
    dcp.save({"model": {"weight": torch.ones(4, 6)}, "step": 7}, checkpoint_id=folder, use_collectives=False)


def without_bytes(folder: Path) -> None:
    """Remove the bytes of the weight from the metadata and file of rank 2."""
    path = folder / "__2.metadata"
    metadata = pickle.loads(path.read_bytes())
    place = metadata.storage_data[MetadataIndex("model.weight", (0, 0))]
    place.offset = place.length = 0
    path.write_bytes(pickle.dumps(metadata))


OF_A_RANK = {
    "no metadata": (removed("__2.metadata"), "torn", "no __2.metadata, which rank 2 writes last"),
    "no metadata of the last": (removed("__3.metadata"), "torn", "no __3.metadata, which rank 3 writes last"),
    "metadata not renamed": (
        lambda at: (at / "__1.metadata").rename(at / "__1.metadata.tmp"), "torn", "no __1.metadata, which"
    ),
    "metadata not renamed over an earlier save": (
        lambda at: (at / "__1.metadata.tmp").write_bytes(b""), "torn", "the save of rank 1 did not finish"
    ),
    "neither": (removed("__1.metadata", "__1_0.distcp"), "torn", "no __1.metadata"),
    "neither of the first": (removed("__0.metadata", "__0_0.distcp"), "torn", "no __0.metadata"),
    "no data": (removed("__2_0.distcp"), "damaged", "no such file"),
    "empty data": (cut("__2_0.distcp", 0), "damaged", "is 0 bytes; the metadata says"),
    "short data": (cut("__2_0.distcp", 0.5), "damaged", "bytes; the metadata says"),
    "metadata short": (cut("__2.metadata", 0.5), "damaged", "__2.metadata: not written by DCP"),
    "a tensor of 0 bytes": (without_bytes, "damaged", "0 bytes in __2_0.distcp for 24 elements"),
    "neither of the last": (removed("__3.metadata", "__3_0.distcp"), "complete", ""),  # not detectable
}  # fmt: skip


def test_incomplete_rank_with_replicated_tensors(
    ask: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without collectives every rank writes replicated tensors, so the other ranks have all of them."""
    ask(save_replicated, str(tmp_path / "run/step-1"))
    assert looked_at(tmp_path / "run/step-1", capsys=capsys)[0] == 0
    for case, (damage, state, message) in OF_A_RANK.items():
        torn = tmp_path / "run/step-2"
        shutil.copytree(tmp_path / "run/step-1", torn)
        damage(torn)
        assert on_disk.audited(torn).state == state, case
        assert message in on_disk.audited(torn).why, case
        assert main(["audit", "--newest", str(tmp_path / "run")]) == 0
        newest = 2 if state == "complete" else 1
        assert capsys.readouterr().out == f"{tmp_path / 'run'}/step-{newest}\n", case
        shutil.rmtree(torn)
