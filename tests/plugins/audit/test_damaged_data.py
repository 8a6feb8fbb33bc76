"""Checkpoints with damage that lengths and `.metadata` do not show, or with files of another save, audited
with and without their data."""

import io
import os
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_foreign_checkpoints import rewritten
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.serialization import set_crc32_options

from dcpbench.cli.commands import main

Damage = Callable[[Path], object]
WEIGHT, STEP = "model.weight", "step"


def save(folder: Path, step: int) -> None:
    """A file for each tensor; all of them where a first save would have put them."""
    state = {
        "model": {"weight": torch.full((40, 60), step + 0.5), "bias": torch.full((40,), float(step))},
        "optimizer": {"weight": torch.full((40, 60), step + 0.25)},
        "step": step,
    }
    with warnings.catch_warnings(action="ignore"):
        writer = FileSystemWriter(folder, single_file_per_rank=False)
        dcp.save(state, storage_writer=writer, no_dist=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(folder / "step-1", 1)
    save(folder / "other", 2)
    return folder


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage, next to the others."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path / "step-1"


def file_of(folder: Path, key: str) -> Path:
    """Return the file that contains a tensor or value."""
    places = FileSystemReader(folder).read_metadata().storage_data
    return folder / next(place.relative_path for index, place in places.items() if index.fqn == key)


def zeroed(key: str, begin: float, end: float) -> Damage:
    """Zeros in this part of the file of a key."""

    def damage(folder: Path) -> None:
        path = file_of(folder, key)
        content = bytearray(path.read_bytes())
        first, last = int(begin * len(content)), int(end * len(content))
        content[first:last] = bytes(last - first)
        path.write_bytes(content)

    return damage


def flipped(folder: Path) -> None:
    path = file_of(folder, WEIGHT)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def exchanged(one: str, other: str) -> Damage:
    def damage(folder: Path) -> None:
        paths = file_of(folder, one), file_of(folder, other)
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, reversed(contents), strict=True):
            path.write_bytes(content)

    return damage


def of_other(save: str, name: str) -> Damage:
    return lambda folder: shutil.copy(folder.parent / save / name, folder / name)


def placed(index: MetadataIndex = MetadataIndex(WEIGHT, (0, 0)), **changes: Any) -> Damage:  # noqa: B008
    """Change the place of the weight, or of another value, in the metadata."""
    return rewritten(lambda of: of.storage_data.update({index: replace(of.storage_data[index], **changes)}))


def of_dtype(dtype: torch.dtype) -> Damage:
    return rewritten(lambda of: setattr(of.state_dict_metadata[WEIGHT].properties, "dtype", dtype))


def archived(key: str, index: MetadataIndex, compression: int) -> Damage:
    """Replace the file of a tensor or value by an archive of a record that is not its data."""

    def damage(folder: Path) -> None:
        path = file_of(folder, key)
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("archive/data.pkl", bytes(2000))
        placed(index, length=path.stat().st_size)(folder)

    return damage


def looped(folder: Path) -> None:
    path = file_of(folder, WEIGHT)
    path.unlink()
    path.symlink_to(path.name)


def of_no_text(folder: Path) -> None:
    path = file_of(folder, WEIGHT)
    path.rename(folder / os.fsdecode(b"\xff.distcp"))


IN_METADATA = {
    "another place": (
        placed(relative_path="__7_0.distcp"),
        "__7_0.distcp: no such file; the metadata says 11177 bytes",
    ),
    "a path that leads out": (placed(relative_path="../other/.metadata"), "../other/.metadata: no such"),
    "a path from the root": (placed(relative_path="/etc/hostname"), "/etc/hostname: no such"),
    "a path with a NUL": (placed(relative_path="a\0b"), r"a\x00b: no such"),
    "a path that is a number": (placed(relative_path=7), "a file is named 7"),
    "a huge length": (placed(length=2**70), f"is 11177 bytes; the metadata says {2**70}"),
    "a negative length": (placed(length=-1), "ends before it begins"),
    "a negative offset": (placed(offset=-1), "begins before byte 0"),
    "half a byte": (placed(length=0.5), "not written by DCP"),
    "a file extended": (lambda at: file_of(at, WEIGHT).open("ab").write(b"x"), "11178"),
    "files exchanged": (exchanged(WEIGHT, "model.bias"), "bytes; the metadata says"),
    "a loop of links": (looped, "no such file"),
    "a name that is no text": (of_no_text, "no such file"),
}
"""Damage that is reported without reading the data."""

IN_DATA = {
    "a tensor of zeros": (zeroed(WEIGHT, 0, 1), WEIGHT),
    "its first sector": (zeroed(WEIGHT, 0, 512 / 11177), WEIGHT),
    "its middle": (zeroed(WEIGHT, 0.4, 0.6), WEIGHT),
    "its end": (zeroed(WEIGHT, 0.95, 1), WEIGHT),
    "a value of zeros": (zeroed(STEP, 0, 1), STEP),
    "a bit": (flipped, WEIGHT),
    "a wider dtype": (of_dtype(torch.float64), WEIGHT),
    "a narrower dtype": (of_dtype(torch.bfloat16), WEIGHT),
    "compressed": (archived(STEP, MetadataIndex(STEP), zipfile.ZIP_DEFLATED), STEP),
    "no record of data": (archived(WEIGHT, MetadataIndex(WEIGHT, (0, 0)), zipfile.ZIP_STORED), WEIGHT),
}
"""Damage that is reported only with the data."""

UNDETECTED = {
    "files of one size exchanged": exchanged(WEIGHT, "optimizer.weight"),
    "a file of another save": of_other("other", "__0_0.distcp"),
    "metadata of another save": of_other("other", ".metadata"),
}
"""Damage that cannot be detected, because `dcp.save` could have written the same files."""


def audited(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Return the exit status, and the lines before the table of keys."""
    status = main(["audit", *map(str, words)])
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    return status, said.out.partition("  key ")[0].splitlines()


@pytest.mark.parametrize("case", IN_METADATA)
def test_damage_in_lengths_or_metadata_is_reported(
    case: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, line = IN_METADATA[case]
    damage(checkpoint)
    status, lines = audited(checkpoint, capsys=capsys)
    assert status == 1
    assert lines[0].startswith(f"{checkpoint}: damaged")
    assert any(line in one for one in lines)


@pytest.mark.parametrize("case", IN_DATA)
def test_damage_in_the_data_needs_data_to_be_read(
    case: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, key = IN_DATA[case]
    damage(checkpoint)
    assert audited(checkpoint, capsys=capsys)[0] == 0
    status, lines = audited("--data", checkpoint, capsys=capsys)
    assert status == 1
    (line,) = lines[2:]
    assert line.startswith(f"  {key}: its bytes in {file_of(checkpoint, key).name} are damaged: ")


@pytest.mark.parametrize("case", UNDETECTED)
def test_undetectable_damage_is_not_reported(
    case: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The docs list this damage; if this test fails, the audit has improved."""
    UNDETECTED[case](checkpoint)
    assert audited("--data", checkpoint, capsys=capsys)[0] == 0


def test_data_without_usable_checksums_pass(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audited("--data", saved / "step-1", capsys=capsys)[0] == 0
    set_crc32_options(False)
    try:
        save(tmp_path / "unchecked", 1)
    finally:
        set_crc32_options(True)
    assert audited("--data", tmp_path / "unchecked", capsys=capsys)[0] == 0
    shutil.copytree(saved / "step-1", tmp_path / "step-1")
    placed(transform_descriptors=["zstd"])(tmp_path / "step-1")
    zeroed(WEIGHT, 0, 1)(tmp_path / "step-1")
    assert audited("--data", tmp_path / "step-1", capsys=capsys)[0] == 0, "transformed data cannot be checked"


def test_data_of_every_element_size_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dtypes = (torch.float8_e4m3fn, torch.bool, torch.bfloat16, torch.uint16, torch.complex64, torch.complex32)
    state: dict[str, Any] = {str(dtype): torch.ones(3, 5).to(dtype) for dtype in dtypes}
    state |= {"scalar": torch.tensor(3.0), "empty": torch.ones(0, 3), "stream": io.BytesIO(b"raw")}
    state["expanded"] = torch.ones(1).expand(100)
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert audited("--data", tmp_path, capsys=capsys)[0] == 0


def test_unreadable_file_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:  # that of pytest is closed to others
        Path(folder).chmod(0o755)
        save(Path(folder) / "step-1", 1)
        file_of(Path(folder) / "step-1", WEIGHT).chmod(0)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            status, lines = audited(Path(folder) / "step-1", capsys=capsys)
        finally:
            if is_root:
                os.seteuid(0)
    assert status == 1
    assert lines[2:] == ["  __0_0.distcp: no permission to read it"]
