"""`.metadata` of plain `dcp.save` that somebody has made: no code in it is run, and no class is changed."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from test_foreign_checkpoints import METADATA, save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from dcpbench.cli.commands import main
from dcpbench.formats import dcp_metadata, on_disk


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tmp_path / "step-1")
    return tmp_path / "step-1"


class Calls:
    """Return a pickle that calls a function."""

    def __init__(self, function: Callable, *arguments: object) -> None:
        self._made = function, arguments

    def __reduce__(self) -> tuple:
        return self._made


def in_metadata(thing: object) -> bytes:
    return pickle.dumps(Metadata({"w": BytesStorageMetadata()}, planner_data=thing))


MALICIOUS = {
    "a command": pickle.dumps(Calls(os.system, "touch ran")),
    "within metadata": in_metadata(Calls(os.system, "touch ran")),
    "an open": in_metadata(Calls(open, "ran", "w")),
    "an eval": pickle.dumps(Calls(eval, "open('ran', 'w')")),
    "by way of torch": b"\x80\x04\x8c\x05torch\x8c\tos.system\x93\x8c\ttouch ran\x85R.",
    "by way of a dtype": b"\x80\x04\x8c\x05torch\x8c\rfloat32.__new_\x93.",
    "by way of a class": b"\x80\x04\x8c%torch.distributed.checkpoint.metadata\x8c\x0cos.system.__\x93.",
    "an old way": b"cposix\nsystem\n(S'touch ran'\ntR.",
    "an instance": b"(S'touch ran'\niposix\nsystem\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"Pnumber\n.",
}


@pytest.mark.parametrize("case", MALICIOUS)
def test_malicious_pickle_runs_nothing(
    case: str, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    (checkpoint / METADATA).write_bytes(MALICIOUS[case])
    assert main(["audit", str(checkpoint)]) == 1
    said = capsys.readouterr()
    assert said.out.count("\n") == 2
    assert ".metadata: not written by DCP" in said.out
    assert not Path("ran").exists()


def test_pickle_cannot_change_classes(checkpoint: Path, tmp_path: Path) -> None:
    """BUILD with slots sets attributes of any object on the stack, even of a class."""
    before = (checkpoint / METADATA).read_bytes()
    build = (
        b"\x80\x04\x8c%torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93N}\x8c\x05stateK\x01s\x86b."
    )
    (checkpoint / METADATA).write_bytes(build)
    assert on_disk.audited(checkpoint).state == "damaged"
    assert not hasattr(Metadata, "state")
    assert not hasattr(dcp_metadata._Record, "state")
    (checkpoint / METADATA).write_bytes(before)
    assert on_disk.audited(checkpoint).state == "complete"
