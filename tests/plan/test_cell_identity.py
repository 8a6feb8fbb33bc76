"""The identity of a cell: it survives the move of a module, and contains the targets that a user typed."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from dcpbench.code.provenance import conf_folders
from dcpbench.config.schema import Config, conf_folder
from dcpbench.core.cell_key import CellKey, is_below
from dcpbench.plan import plan
from dcpbench.plan.plan import identity_of
from support import alone

FILES = [
    path
    for folder in conf_folders()
    for path in sorted(folder.glob("*/*.yaml"))
    if path.parent.name not in ("experiment", "executor")
]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `conf/` that names dcpbench's modules in another package."""
    place = tmp_path_factory.mktemp("conf")
    for folder in conf_folders():
        for path in folder.glob("*/*.yaml"):
            copy = place / path.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(path.read_text().replace(" dcpbench.", " elsewhere."))
    return place


@cache
def defaults() -> Config:
    return alone.config()


@cache
def schema(group: str) -> DictConfig:
    made: DictConfig = OmegaConf.structured(type(getattr(defaults(), group)))
    return made


def config(file: Path, **settings: Any) -> Config:
    """The default configuration with the value of a group that a file describes, and these settings of it."""
    made, group = defaults(), file.parent.name
    value = OmegaConf.to_object(OmegaConf.merge(schema(group), OmegaConf.load(file), settings))
    return replace(made, **{group: value})


def of_group(key: CellKey, group: str) -> dict[str, Any]:
    return {name: value for name, value in key.values.items() if is_below(name, [group])}


def test_a_moved_module_changes_no_identity(moved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {file: of_group(identity_of(config(file)), file.parent.name) for file in FILES}
    monkeypatch.setattr(plan, "conf_folders", lambda: [moved])
    monkeypatch.setattr(plan, "_code_paths", cache(plan._code_paths.__wrapped__))
    for file, values in here.items():
        there = config(moved / file.parent.name / file.name)
        assert of_group(identity_of(there), file.parent.name) == values
        assert not [value for value in values.values() if "dcpbench." in str(value)]


def test_a_removed_key_changes_no_identity() -> None:
    """Rows that were written while the key existed have these values."""
    earlier = {
        "default": {"filled": True, "gradients": False, "scheduler": True},
        "never_stepped": {"filled": False, "gradients": False, "scheduler": True},
    }
    for name, values in earlier.items():
        key = identity_of(config(conf_folder() / f"load_into/{name}.yaml"))
        expected = {"load_into.name": name} | {f"load_into.{key}": value for key, value in values.items()}
        assert of_group(key, "load_into") == expected


def test_typed_code_is_part_of_the_identity() -> None:
    ddp = conf_folder() / "parallel/ddp.yaml"
    same = "dcpbench.workloads.parallelisms.ddp"
    typed = [identity_of(config(ddp, target=target)) for target in (same, "mine.ddp", "torch.ddp")]
    assert [key.values.get("parallel.target") for key in typed] == [None, "mine.ddp", "torch.ddp"]
    assert len({key.digest for key in typed}) == 3
    assert typed[0].digest == identity_of(config(ddp)).digest


def test_value_of_a_users_file_keeps_its_target(tmp_path: Path) -> None:
    (tmp_path / "parallel").mkdir()
    own = tmp_path / "parallel/mine.yaml"
    own.write_text("name: mine\ntarget: mine.wrap\n")
    assert identity_of(config(own)).values["parallel.target"] == "mine.wrap"
