"""One corpus of checkpoint folders, of DCP and of safetensors, with damage that a reader of the files meets.

It is reported, and no code in it is run. tests/formats/test_audit.py has damage of what they describe."""

import io
import json
import os
import pickle
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.serialization import set_crc32_options

from conftest import Command
from dcpbench.formats import dcp_metadata, on_disk
from support.gloo_ranks import WORLD_SIZE, Ask

Damage = Callable[[Path], object]
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)
DATA, METADATA = "__0_0.distcp", ".metadata"
WEIGHT, STEP = "model.weight", "step"
AT_0 = MetadataIndex(WEIGHT, (0, 0))
INDEX = "model.safetensors.index.json"
ONE, TWO = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
STATUS = {"complete": 0, "damaged": 1, "torn": 1, "none": 2}


def save_in_one_file(folder: Path) -> None:
    tensors = {f"of {dtype}": torch.zeros(2, 3, dtype=dtype) for dtype in DTYPES}
    state = {"model": {"weight": torch.rand(4, 6), **tensors}, "epoch": 7, "empty": torch.rand(0, 3)}
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def save_in_files(folder: Path, step: int = 1) -> None:
    """A file for each tensor; all of them where a first save would have put them."""
    state = {
        "model": {"weight": torch.full((40, 60), step + 0.5), "bias": torch.full((40,), float(step))},
        "optimizer": {"weight": torch.full((40, 60), step + 0.25)},
        "step": step,
    }
    with warnings.catch_warnings(action="ignore"):
        writer = FileSystemWriter(folder, single_file_per_rank=False)
        dcp.save(state, storage_writer=writer, no_dist=True)


def save_replicated(folder: str) -> None:
    """Save the same tensors on each rank separately: every rank has metadata of its own."""
    dcp.save({"model": {"weight": torch.ones(4, 6)}, "step": 7}, checkpoint_id=folder, use_collectives=False)


def packed(tensors: dict[str, Any], data: int, extra: dict[str, str] | None = None) -> bytes:
    """A file of safetensors with this header and number of bytes of data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(extra or {})}}
    for key, (dtype, shape, begin, end) in tensors.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def write_safetensors(folder: Path) -> None:
    """Two files and an index, as a trainer writes them."""
    folder.mkdir(parents=True)
    first = {"w": ("F32", [4, 6], 0, 96), "b": ("BF16", [4], 96, 104), "none": ("I64", [0, 3], 104, 104)}
    (folder / ONE).write_bytes(packed(first, 104))
    (folder / TWO).write_bytes(packed({"scale": ("F64", [], 0, 8)}, 8))
    listed = {"w": ONE, "b": ONE, "none": ONE, "scale": TWO}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 112}, "weight_map": listed}))


def write_shards(folder: Path, offsets: Sequence[Sequence[Any]] = ((0, 0), (2, 0))) -> None:
    """The files of DCP's HuggingFace storage writer for two ranks with half of `w` each."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, at in enumerate(offsets, 1):
        extra = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": at}})}
        name = f"shard-0000{rank}-model-00001-of-00001.safetensors"
        (folder / name).write_bytes(packed({"w": ("F32", [2, 6], 0, 48)}, 48, extra))


@pytest.fixture(scope="module")
def corpus(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a complete checkpoint of each kind."""
    folder = tmp_path_factory.mktemp("corpus")
    save_in_one_file(folder / "one file")
    save_in_files(folder / "files")
    save_in_files(folder / "other", 2)
    ask(save_replicated, str(folder / "ranks"))
    write_safetensors(folder / "safetensors")
    write_shards(folder / "shards")
    return folder


def copied(corpus: Path, kind: str, place: Path) -> Path:
    """Copy a checkpoint, to damage it."""
    return Path(shutil.copytree(corpus / kind, place / "step-1"))


def audited(command: Command, state: str, *words: str | Path) -> dict[str, Any]:
    """The folder whose audit ends with the exit status of this state."""
    (seen,) = command("audit", "--json", *words, status=STATUS[state]).json()
    assert seen["state"] == state
    return seen


def cut(name: str, left: float) -> Damage:
    """Leave this part of a file, or this many bytes."""
    return lambda at: os.truncate(at / name, int((at / name).stat().st_size * left) if left < 1 else left)


def removed(*names: str) -> Damage:
    return lambda at: [(at / name).unlink() for name in names]


def replaced(name: str, make: Callable[[Path], object]) -> Damage:
    return lambda at: ((at / name).unlink(), make(at / name))


def raw(name: str, content: bytes) -> Damage:
    return lambda at: (at / name).write_bytes(content)


meta = partial(raw, METADATA)


def link(to: str) -> Callable[[Path], object]:
    return lambda at: at.symlink_to(to)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**42)


def rewritten(change: Callable[[Metadata], object], name: str = METADATA) -> Damage:
    """Change the content of `.metadata`."""

    def damage(folder: Path) -> None:
        metadata = pickle.loads((folder / name).read_bytes())
        change(metadata)
        (folder / name).write_bytes(pickle.dumps(metadata))

    return damage


def placed(index: MetadataIndex = AT_0, name: str = METADATA, **changes: Any) -> Damage:
    """Change the place of the weight, or of another value."""
    at = index
    return rewritten(lambda of: of.storage_data.update({at: replace(of.storage_data[at], **changes)}), name)


def chunked(*chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> Damage:
    """The weight in these chunks (offsets, sizes), all of them stored."""

    def change(metadata: Metadata) -> None:
        place = metadata.storage_data.pop(AT_0)
        metadata.state_dict_metadata[WEIGHT].chunks = [
            ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in chunks
        ]
        metadata.storage_data.update({MetadataIndex(WEIGHT, at): place for at, _ in chunks})

    return rewritten(change)


def file_of(folder: Path, key: str) -> Path:
    """Return the file that contains a tensor or value."""
    places = FileSystemReader(folder).read_metadata().storage_data
    return folder / next(place.relative_path for index, place in places.items() if index.fqn == key)


def exchanged(one: str, other: str) -> Damage:
    def damage(folder: Path) -> None:
        paths = file_of(folder, one), file_of(folder, other)
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, reversed(contents), strict=True):
            path.write_bytes(content)

    return damage


class Calls:
    """Its pickle calls a function."""

    def __init__(self, function: Callable, *arguments: object) -> None:
        self._made = function, arguments

    def __reduce__(self) -> tuple:
        return self._made


def with_header(tensors: dict[str, Any], data: int) -> Damage:
    """The second file of safetensors with this header, and this many bytes."""
    return raw(TWO, packed(tensors, data))


def listing(**listed: Any) -> Damage:
    """An index that also lists these files, or omits those with an empty value."""

    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        names = index["weight_map"] | listed
        index["weight_map"] = {key: name for key, name in names.items() if name}
        (folder / INDEX).write_text(json.dumps(index))

    return damage


DEEP = b"[" * 100_000
NOT_OF_DCP = ".metadata: not written by DCP"
DAMAGED: dict[str, dict[str, tuple[Damage, str] | tuple[Damage, str, str]]] = {
    "one file": {
        "data short": (cut(DATA, 0.5), "bytes; the metadata says"),
        "data missing": (removed(DATA), "no such file"),
        "data a pipe": (replaced(DATA, os.mkfifo), "no such file"),
        "data huge": (replaced(DATA, sparse), "is 4398046511104 bytes; the metadata says"),
        "no metadata": (removed(METADATA), "its save did not finish", "torn"),
        "nothing": (removed(METADATA, DATA), "no DCP or safetensors checkpoint", "none"),
        "metadata short": (cut(METADATA, 0.9), NOT_OF_DCP),
        "metadata empty": (cut(METADATA, 0), "EOFError"),
        "metadata a pipe": (replaced(METADATA, os.mkfifo), "it is not a regular file"),
        "metadata a folder": (replaced(METADATA, Path.mkdir), "Is a directory"),
        "metadata huge": (replaced(METADATA, sparse), "bytes are more than"),
        "metadata a loop": (replaced(METADATA, lambda at: at.symlink_to(at)), "cannot be read"),
        "metadata text": (meta(b"hello"), "not written by DCP"),
        "metadata a list": (meta(pickle.dumps([1])), "no metadata"),
        "other dimensions": (chunked(((0,), (24,))), "invalid shapes"),
        "negative": (chunked(((0, 0), (4, -6))), "invalid shapes"),
        "0 bytes": (placed(length=0), "0 bytes in __0_0.distcp for 24 elements of torch.float32"),
        "key a number": (
            rewritten(lambda of: of.state_dict_metadata.update({7: BytesStorageMetadata()})),
            "not written by DCP",
        ),
        "no storage": (rewritten(lambda of: setattr(of, "storage_data", None)), "nothing is stored"),
        "no places": (rewritten(lambda of: setattr(of, "storage_data", [1])), "not written by DCP"),
        "a command": (meta(pickle.dumps(Calls(os.system, "touch ran"))), NOT_OF_DCP),
        "a command in it": (
            rewritten(lambda of: setattr(of, "planner_data", Calls(open, "ran", "w"))),
            NOT_OF_DCP,
        ),
        "a command by torch": (
            meta(b"\x80\x04\x8c\x05torch\x8c\tos.system\x93\x8c\ttouch ran\x85R."),
            NOT_OF_DCP,
        ),
        "a dtype's class": (meta(b"\x80\x04\x8c\x05torch\x8c\rfloat32.__new_\x93."), NOT_OF_DCP),
        "a class's module": (
            meta(b"\x80\x04\x8c%torch.distributed.checkpoint.metadata\x8c\x0cos.system.__\x93."),
            NOT_OF_DCP,
        ),
        "an old command": (meta(b"cposix\nsystem\n(S'touch ran'\ntR."), NOT_OF_DCP),
        "an instance": (meta(b"(S'touch ran'\niposix\nsystem\n."), NOT_OF_DCP),
        "an extension": (meta(b"\x80\x02\x82\x01."), NOT_OF_DCP),
        "a persistent id": (meta(b"Pnumber\n."), NOT_OF_DCP),
    },
    "files": {
        "another place": (
            placed(relative_path="__7_0.distcp"),
            "__7_0.distcp: no such file; the metadata says 11177 bytes",
        ),
        "a path with a NUL": (placed(relative_path="a\0b"), r"a\x00b: no such"),
        "a path that is a number": (placed(relative_path=7), "a file is named 7"),
        "a negative length": (placed(length=-1), "ends before it begins"),
        "a negative offset": (placed(offset=-1), "begins before byte 0"),
        "a file extended": (lambda at: file_of(at, WEIGHT).open("ab").write(b"x"), "11178"),
        "files exchanged": (exchanged(WEIGHT, "model.bias"), "bytes; the metadata says"),
        "a loop of links": (
            lambda at: replaced(name := file_of(at, WEIGHT).name, link(name))(at),
            "no such file",
        ),
        "a name that is no text": (
            lambda at: file_of(at, WEIGHT).rename(at / os.fsdecode(b"\xff.distcp")),
            "no such file",
        ),
    },
    "ranks": {
        "no metadata": (removed("__2.metadata"), "no __2.metadata, which rank 2 writes last", "torn"),
        "no last metadata": (removed("__3.metadata"), "no __3.metadata, which rank 3 writes last", "torn"),
        "metadata of a save before": (
            raw("__1.metadata.tmp", b""),
            "the save of rank 1 did not finish",
            "torn",
        ),
        "no first rank": (removed("__0.metadata", "__0_0.distcp"), "no __0.metadata", "torn"),
        "no last rank": (removed("__3.metadata", "__3_0.distcp"), "", "complete"),  # not detectable
        "empty data": (cut("__2_0.distcp", 0), "is 0 bytes; the metadata says"),
        "metadata short": (cut("__2.metadata", 0.5), "__2.metadata: not written by DCP"),
        "a tensor of 0 bytes": (
            placed(name="__2.metadata", offset=0, length=0),
            "0 bytes in __2_0.distcp for 24 elements",
        ),
    },
    "safetensors": {
        "long": (cut(ONE, 4096), "is 4096 bytes; the metadata says"),
        "missing": (removed(TWO), "no such file; keys listed in it: 1"),
        "a number missing": (removed(TWO, INDEX), f"{TWO}: no such file, though files are numbered up to 2"),
        "a pipe": (replaced(TWO, os.mkfifo), "no such file"),
        "header cut": (cut(ONE, 60), "its header has 52 of "),
        "header too long": (raw(TWO, b"\xff" * 64), "its header has 56 of "),
        "header no JSON": (raw(TWO, (4).to_bytes(8, "little") + b"\x80abc"), "not a safetensors file"),
        "header deep": (raw(TWO, len(DEEP).to_bytes(8, "little") + DEEP), "not a safetensors file"),
        "header a list": (raw(TWO, (2).to_bytes(8, "little") + b"[]"), "its header is not a mapping"),
        "no shape": (raw(TWO, (8).to_bytes(8, "little") + b'{"w":{}}'), "'shape'"),
        "negative": (with_header({"scale": ("F64", [-1], 0, 8)}, 8), "invalid shapes"),
        "no number": (with_header({"scale": ("F64", [], "0", 8)}, 8), "scale has the offsets ['0', 8]"),
        "elements": (with_header({"scale": ("F64", [2], 0, 8)}, 8), f"8 bytes in {TWO} for 2 elements"),
        "overlap": (
            with_header({"scale": ("F64", [], 0, 8), "x": ("F64", [], 4, 12)}, 12),
            "belong to both scale and x",
        ),
        "a hole": (with_header({"scale": ("F64", [], 8, 16)}, 16), "belong to no tensor"),
        "beyond": (with_header({"scale": ("F64", [], 0, 8)}, 4), "bytes; the metadata says"),
        "another dtype": (
            with_header({"w": ("F64", [4, 6], 0, 192)}, 192),
            f"w differs from the tensor of this name in {ONE}",
        ),
        "twice": (with_header({"w": ("F32", [4, 6], 0, 96)}, 96), "[0, 0] and [0, 0] overlap"),
        "a key missing": (listing(bias=ONE), "bias: to be saved, but not in the checkpoint"),
        "a key too many": (listing(w=""), "w: stored, but not under any key"),
        "an index that is none": (raw(INDEX, b"{}"), "not an index of keys"),
        "an index of numbers": (listing(w=7), "not an index of keys"),
        # An interrupted save of DCP is no checkpoint of the safetensors beside it.
        "an unfinished DCP": (raw(DATA, b""), "its save did not finish", "torn"),
    },
    "shards": {
        "a gap": (partial(write_shards, offsets=((0, 0), (3, 0))), "have 24 of 30 elements"),
        "an overlap": (partial(write_shards, offsets=((0, 0), (1, 0))), "overlap"),
        "one dimension": (partial(write_shards, offsets=((0, 0), (2,))), "not a safetensors file"),
        "no numbers": (partial(write_shards, offsets=((0, 0), (2, "0"))), "not a safetensors file"),
    },
}


@pytest.mark.parametrize(
    ("kind", "case"),
    [pytest.param(kind, case, id=f"{kind}: {case}") for kind in DAMAGED for case in DAMAGED[kind]],
)
def test_damage_is_reported(
    kind: str,
    case: str,
    corpus: Path,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damage, message, *of_case = DAMAGED[kind][case]
    state = of_case[0] if of_case else "damaged"
    folder = copied(corpus, kind, tmp_path)
    damage(folder)
    monkeypatch.chdir(tmp_path)
    shown = command("audit", folder, status=STATUS[state])
    assert shown.out.startswith(f"{folder}: {'' if state == 'none' else state}")
    assert message in shown.out.replace("(", "[").replace(")", "]")
    assert shown.err == ""
    assert not Path("ran").exists(), "code in it was run"


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


IN_DATA: dict[str, tuple[Damage, str]] = {
    "a tensor of zeros": (zeroed(WEIGHT, 0, 1), WEIGHT),
    "a value of zeros": (zeroed(STEP, 0, 1), STEP),
    "a bit": (flipped, WEIGHT),
    "a narrower dtype": (of_dtype(torch.bfloat16), WEIGHT),
    "compressed": (archived(STEP, MetadataIndex(STEP), zipfile.ZIP_DEFLATED), STEP),
    "no record of data": (archived(WEIGHT, AT_0, zipfile.ZIP_STORED), WEIGHT),
    # `dcp.save` could have written the same files. The docs list these; a line here says that it improved.
    "files of one size exchanged": (exchanged(WEIGHT, "optimizer.weight"), ""),
    "a file of another save": (lambda at: shutil.copy(at.parent / "other" / DATA, at), ""),
    "metadata of another save": (lambda at: shutil.copy(at.parent / "other" / METADATA, at), ""),
    "data that were transformed": (
        lambda at: (placed(transform_descriptors=["zstd"])(at), zeroed(WEIGHT, 0, 1)(at)),
        "",
    ),
}


@pytest.mark.parametrize("case", IN_DATA)
def test_damage_in_the_data_needs_data_to_be_read(
    case: str, corpus: Path, tmp_path: Path, command: Command
) -> None:
    damage, key = IN_DATA[case]
    folder = copied(corpus, "files", tmp_path)
    (tmp_path / "other").symlink_to(corpus / "other")
    damage(folder)
    audited(command, "complete", folder)
    seen = audited(command, "damaged" if key else "complete", "--data", folder)
    wanted = [f"{key}: its bytes in {file_of(folder, key).name} are damaged: "] if key else []
    assert [item["text"].startswith(text) for item, text in zip(seen["findings"], wanted, strict=True)] == [
        True for _ in wanted
    ], seen["findings"]


def test_data_of_every_kind_pass(tmp_path: Path, command: Command) -> None:
    dtypes = (torch.float8_e4m3fn, torch.bool, torch.bfloat16, torch.uint16, torch.complex64, torch.complex32)
    state: dict[str, Any] = {str(dtype): torch.ones(3, 5).to(dtype) for dtype in dtypes}
    tensors = {name: value for name, value in state.items() if not value.is_complex()}
    state |= {"scalar": torch.tensor(3.0), "empty": torch.ones(0, 3), "stream": io.BytesIO(b"raw")}
    state["expanded"] = torch.ones(1).expand(100)
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_crc32_options(False)
    try:
        save_in_files(tmp_path / "without checksums")
    finally:
        set_crc32_options(True)
    for folder in tmp_path.iterdir():
        audited(command, "complete", "--data", folder)
    (tmp_path / "safetensors").mkdir()
    save_file({**tensors, "none": torch.zeros(0, 3)}, tmp_path / "safetensors/model.safetensors")
    seen = audited(command, "complete", tmp_path / "safetensors")
    assert seen["findings"] == []
    assert {seen["keys"][name]["dtype"] for name in tensors} == tensors.keys()


def test_unreadable_file_is_reported(corpus: Path, command: Command) -> None:
    with tempfile.TemporaryDirectory() as place:  # that of pytest is closed to others
        Path(place).chmod(0o755)
        folder = copied(corpus, "files", Path(place))
        file_of(folder, WEIGHT).chmod(0)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            seen = audited(command, "damaged", folder)
        finally:
            if is_root:
                os.seteuid(0)
    assert [item["text"] for item in seen["findings"]] == [f"{DATA}: no permission to read it"]


def test_names_with_control_characters_are_escaped(corpus: Path, tmp_path: Path, command: Command) -> None:
    folder = copied(corpus, "one file", tmp_path)
    (folder / os.fsdecode(b"\xff\x1b[31m")).write_text("stray")
    key = {"\x1b]0;title\x07\ud800": BytesStorageMetadata()}
    rewritten(lambda of: of.state_dict_metadata.update(key))(folder)
    for words in ([], ["--json"]):
        said = command("audit", *words, folder, status=1)
        assert "\x1b" not in said.out + said.err
        assert words or r"\x1b]0;title\x07" in said.out


def test_pickle_cannot_change_classes(corpus: Path, tmp_path: Path) -> None:
    """BUILD with slots sets attributes of any object on the stack, even of a class."""
    folder = copied(corpus, "one file", tmp_path)
    module = b"torch.distributed.checkpoint.metadata"
    build = b"\x80\x04\x8c%" + module + b"\x8c\x08Metadata\x93N}\x8c\x05stateK\x01s\x86b."
    (folder / METADATA).write_bytes(build)
    assert on_disk.audited(folder).state == "damaged"
    assert not hasattr(Metadata, "state")
    assert not hasattr(dcp_metadata._Record, "state")
    assert on_disk.audited(corpus / "one file").state == "complete"


@pytest.mark.slow
def test_tensor_with_many_chunks_is_audited_quickly(corpus: Path, tmp_path: Path) -> None:
    """20,000 chunks are not all compared with each other."""
    rows = 20_000
    chunks = [ChunkStorageMetadata(torch.Size((row, 0)), torch.Size((1, 8))) for row in range(rows)]

    def change(metadata: Metadata) -> None:
        weight, place = metadata.state_dict_metadata[WEIGHT], metadata.storage_data[AT_0]
        whole = TensorStorageMetadata(weight.properties, torch.Size((rows, 8)), chunks)
        metadata.state_dict_metadata = {"w": whole}
        metadata.storage_data = {MetadataIndex("w", (row, 0)): place for row in range(rows)}

    folder = copied(corpus, "one file", tmp_path)
    rewritten(change)(folder)
    assert [one for one in on_disk.audited(folder).findings if one.name == "w"] == []


def trained() -> tuple[Any, torch.optim.Optimizer]:
    """A model that is sharded over all ranks, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_alone(folder: str) -> None:
    """Each rank for itself, without collectives."""
    states = dict(zip(("model", "optimizer"), get_state_dict(*trained()), strict=True))
    dcp.save(states, checkpoint_id=folder, use_collectives=False)


def save_as_torchtitan(folder: str) -> None:
    """Keys of the model, flattened keys of the optimizer, a data loader of each rank, and streams."""
    model, optimizer = trained()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    losses = io.BytesIO()
    torch.save([0.5], losses)
    states: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
        "lr_scheduler": {"last_epoch": 9},
        "dataloader": {f"dp_rank_{dist.get_rank()}": io.BytesIO(b"state"), "world_size": WORLD_SIZE},
        "train_state": {"step": torch.tensor(9, dtype=torch.int32), "losses": losses},
    }
    dcp.save(states, checkpoint_id=folder)


def save_safetensors(folder: str, sharded: bool) -> None:
    """DCP's own writer, to files of each rank or of one with an index."""
    model = trained()[0] if sharded else torch.nn.Sequential(torch.nn.Linear(6, 10, dtype=torch.bfloat16))
    writer = HuggingFaceStorageWriter(folder, save_distributed=sharded)
    state = get_model_state_dict(model)
    if sharded or dist.get_rank() == 0:
        dcp.save(state, storage_writer=writer, no_dist=not sharded)


MOMENT = "optimizer.state.0.weight.exp_avg"
LOADERS = {f"dataloader.dp_rank_{rank}" for rank in range(WORLD_SIZE)}
SAVED: dict[str, tuple[Callable[..., None], tuple[bool, ...], int, set[str]]] = {
    "each rank alone": (save_alone, (), WORLD_SIZE, {MOMENT, "optimizer.param_groups.0.lr"}),
    "torchtitan": (save_as_torchtitan, (), WORLD_SIZE, {MOMENT, *LOADERS, "train_state.losses"}),
    "safetensors of each rank": (save_safetensors, (True,), WORLD_SIZE, {"1.weight"}),
    "safetensors with an index": (save_safetensors, (False,), 1, {"0.bias"}),
}


@pytest.mark.parametrize("how", SAVED)
def test_saves_of_real_ranks_are_complete_and_read_as_torch_does(
    how: str, ask: Ask, tmp_path: Path, command: Command
) -> None:
    save, arguments, chunks, keys = SAVED[how]
    folder = tmp_path / "step-1"
    ask(save, str(folder), *arguments)
    seen = audited(command, "complete", "--data", folder)
    assert (seen["findings"], seen["beside"]) == ([], [])
    assert seen["keys"].keys() > keys
    weight = seen["keys"]["0.weight" if "safetensors" in how else "model.0.weight"]
    size = 10 // chunks + (10 % chunks > 0)
    assert sorted(chunk["offsets"] for chunk in weight["chunks"]) == [[size * n, 0] for n in range(chunks)]
    if how != "each rank alone":  # which torch reads rank by rank
        reader = HuggingFaceStorageReader if "safetensors" in how else FileSystemReader
        theirs = reader(str(folder)).read_metadata().state_dict_metadata.items()
        shapes = {
            key: (str(one.properties.dtype), [*one.size])
            for key, one in theirs
            if isinstance(one, TensorStorageMetadata)
        }
        ours = {key: (one["dtype"], one["shape"]) for key, one in seen["keys"].items()}
        assert {key: ours[key] for key in shapes} == shapes
        assert ours.keys() == dict(theirs).keys()
    data = sorted([*folder.glob("*.distcp"), *folder.glob("*.safetensors")])
    if how == "each rank alone":  # no file shows how many ranks there were
        data[-1].unlink()
        (folder / "__3.metadata").unlink()
        torn = audited(command, "torn", folder)
        assert {one["name"] for one in torn["findings"]} >= {"model.0.weight", MOMENT}
    os.truncate(data[0], data[0].stat().st_size - 1)
    audited(command, "damaged", folder)
