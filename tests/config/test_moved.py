"""Modules that have moved: cells stay the same, and earlier names can be imported for a version."""

import importlib
import shutil
from pathlib import Path

import pytest

from dcpbench.core.cell_key import CellKey, digest_of
from dcpbench.core.moved import MOVED


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that was `dcpbench.were_here`, with two modules, one of which has left it before."""
    (tmp_path / "are_there").mkdir()
    for name in ("__init__", "inside", "apart"):
        (tmp_path / "are_there" / f"{name}.py").write_text(f"NAME = {name!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, now in (("dcpbench.were_here", "are_there"), ("dcpbench.scenarios.apart", "are_there.apart")):
        monkeypatch.setitem(MOVED, name, now)
    return tmp_path


@pytest.mark.usefixtures("package")
def test_move_keeps_the_identity_of_cells() -> None:
    stages = "[\"StageConfig(target='{}.save', world=1)\"]"
    before = {"a.target": "dcpbench.were_here.inside.f", "stages": stages.format("dcpbench.scenarios.apart")}
    after = {"a.target": "are_there.inside.f", "stages": stages.format("are_there.apart")}
    assert CellKey(after).digest == CellKey(before).digest == digest_of(before)
    assert CellKey(after).part(["a"]) == CellKey(before).part(["a"])
    assert CellKey(after).differences(CellKey(before)) == {}
    other = after | {"a.target": "are_there.insidex.f"}
    assert CellKey(other).differences(CellKey(before)) == {
        "a.target": ("are_there.insidex.f", "dcpbench.were_here.inside.f")
    }


def test_earlier_name_imports_with_a_warning(package: Path) -> None:
    for before, now in (
        ("dcpbench.were_here.inside", "are_there.inside"),
        ("dcpbench.scenarios.apart", "are_there.apart"),
    ):
        with pytest.warns(DeprecationWarning, match=f"{before} has moved: it is {now}"):
            assert importlib.import_module(before) is importlib.import_module(now)
    assert importlib.import_module("dcpbench.were_here").NAME == "__init__"
    shutil.rmtree(package / "are_there")
    with pytest.raises(ModuleNotFoundError, match=r"dcpbench\.nowhere"):
        importlib.import_module("dcpbench.nowhere")
