"""A resumed sweep runs its recorded cells; words that are typed say how."""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from conftest import dcpbench, resume
from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import is_how_run, schema_class
from dcpbench.core.cell_key import HOW_RUN
from dcpbench.sweep.folder import SweepRecord
from dcpbench.sweep.request import value_of
from support.pretended_engine import PRETENDED
from support.requests import request


def keys_of(kind: Any, prefix: str = "", how_run: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield every key of the schema, and whether it was declared `how_run`."""
    for item in fields(kind):
        hint = get_type_hints(kind)[item.name]
        own = how_run or bool(item.metadata.get(HOW_RUN))
        yield f"{prefix}{item.name}", own
        if inside := [one for one in (hint, *get_args(hint)) if is_dataclass(one)]:
            yield from keys_of(inside[0], f"{prefix}{item.name}.", own)


KEYS = dict(keys_of(schema_class()))


def test_schema_tells_which_keys_are_how_run() -> None:
    assert {key for key in KEYS if is_how_run(key)} == {key for key, own in KEYS.items() if own} - {"repeat"}
    assert {"timeouts.cell_s", "timeouts", "load_parallel.gloo", "storage.root"} <= {
        *filter(is_how_run, KEYS)
    }
    assert not any(map(is_how_run, ("storage", "executor.hosts", "seed", "nothing", "timeouts_", "")))


WORDS = ["parallel=ddp,fsdp2", "sharing=none,disjoint", "timeouts.cell_s=100", "executor=ray"]
WORDS += ["executor.address=a:1", "executor.hosts=2", "nccl=lib.so"]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep that was started in another folder, from which it is resumed."""
    sweep, started = tmp_path / "sweep", tmp_path / "started"
    for folder in (sweep, started):
        folder.mkdir()
    SweepRecord(WORDS, str(started), {"a": ["parallel=ddp"]}, []).write(sweep)
    monkeypatch.chdir(tmp_path)
    return sweep


def test_words_on_how_cells_run_replace_those_of_the_sweep(recorded: Path, tmp_path: Path) -> None:
    paths = {"storage.root": "ck", "known_failures": "a b.yaml", "nccl": "lib.so"}
    how = [key for key in KEYS if is_how_run(key) and key not in paths]
    given = [f"{key}=1" for key in how] + ["++retry=0", "executor=ray", "executor.hosts=2"]
    typed = [*given, *(f"{key}='{path}'" for key, path in paths.items())]
    asked = request(typed, Path("own"), resume=recorded)
    taken = asked.words
    assert Path.cwd() == tmp_path / "started"
    options = [word for word in taken if word.startswith("-")]
    assert taken[: len(options)] == options, "Hydra reads no option between two words"
    assert taken[len(options) :][:4] == [
        "parallel=ddp,fsdp2",
        "sharing=1",
        "timeouts.cell_s=1",
        "executor=ray",
    ]
    assert {*given} - {"retry=1"} <= {*taken}
    assert "retry=1" not in taken, "the last word with a key counts"
    assert f"--config-dir={tmp_path}/own" in taken, "a path means what it meant where it was typed"
    read = [value_of(key, asked.overrides) for key in paths]
    assert read == [f"{tmp_path}/ck", f"{tmp_path}/a b.yaml", f"{tmp_path}/lib.so"]


def test_removed_folder_of_a_sweep_is_named(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "started").rmdir()
    with pytest.raises(ConfigError, match=r"cannot enter .*/started, .*; make that folder, or a link"):
        request([], resume=recorded)


def test_words_of_the_sweep_change_nothing(recorded: Path) -> None:
    again = ["executor.hosts=2", "parallel= ddp, fsdp2", "timeouts.cell_s=9"]
    taken = request(again, resume=recorded).words
    assert {*again, "executor.address=a:1", "sharing=none,disjoint"} <= {*taken}
    assert "timeouts.cell_s=100" not in taken


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("seed=1", "leave out seed=1, or run another sweep"),
        ("parallel=ddp,fsdp2 seed=1 save=sync", "leave out seed=1 save=sync, or"),
        ("hydra.sweep.dir=other", "leave out hydra.sweep.dir=other, or"),
        ("parallel=ddp", "leave out parallel=ddp, or"),
        ("+model.options.x=1", "leave out +model.options.x=1, or"),
        ("~fault", r"leave out '~fault', or"),
        ("repeat=1", "leave out repeat=1, or"),
        ("repeats=3", "leave out repeats=3, or"),
        ("matrix=pairwise", "leave out matrix=pairwise, or"),
        ("part=1/2", "leave out part=1/2, or"),
        ("storage=s3", "leave out storage=s3, or"),
        ("executor.hosts=3", "leave out executor.hosts=3, or"),
        ("timeout.cell_s=9", "leave out timeout.cell_s=9, or run another sweep; did you mean timeouts?"),
        ("retry=0,1", "retry=0,1: applies to all cells of a resumed sweep; pass one value"),
    ],
)
def test_words_about_other_cells_are_refused(typed: str, says: str, recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        request([*typed.split(), "retry=0"], resume=recorded)
    assert says in str(refused.value)
    assert says.startswith("retry") or f"run {' '.join(WORDS[:3])} " in str(refused.value)
    assert Path.cwd() == tmp_path


def test_record_whose_cells_are_no_folders_is_refused(tmp_path: Path) -> None:
    for name in ("../x", "..", "a/b", ""):
        SweepRecord([], "/", {"a": [], name: []}, []).write(tmp_path)
        with pytest.raises(ConfigError, match=r"sweep\.json was not written by a sweep"):
            SweepRecord.read(tmp_path)


EXPERIMENT = """# @package _global_
{key}
hydra:
  sweeper:
    matrix:
      checked: {{parallel: "none,ddp", seed: "${{random_seeds:2}}", sharing: correctness}}
      timed: {{parallel: fsdp2, sharing: "none,disjoint", repeats: 2}}
"""


@pytest.mark.slow
def test_recorded_cells_of_an_experiment_run_again(tmp_path: Path) -> None:
    """With random seeds, of which a word selected, after its blocks were edited, by words that were not typed
    again."""
    folder, conf = tmp_path / "sweep", tmp_path / "conf/experiment/mine.yaml"
    conf.parent.mkdir(parents=True)
    conf.write_text(EXPERIMENT.format(key="saves: 2"))
    words = ("--config-dir=conf", "experiment=mine", "device=cpu", "world_size=1", "sharing=correctness,none")
    how = (PRETENDED, "timeouts.cell_s=100", f"hydra.sweep.dir={folder}")
    ended = dcpbench("run", *words, *how, folder=folder)
    assert len(ended.rows) == 6, ended.err
    lines = (folder / "results.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "results.jsonl").write_bytes(b"".join(lines[::2]))
    names = [*json.loads((folder / "sweep.json").read_text())["cells"]]
    before = {one["cell"]: one for one in ended.rows}
    conf.write_text(conf.read_text().replace("none,ddp", "fsdp"))
    resumed = resume(folder, "timeouts.cell_s=900", "retry=0", cwd=tmp_path)
    assert resumed.status == 0, resumed.err
    assert resumed.err.splitlines()[0] == "resume: 3 of 6 cells are done"
    assert " again: " not in resumed.err
    assert [one["cell"] for one in resumed.rows] == names
    assert {one.name for one in folder.iterdir() if one.is_dir()} == {*names}
    for one in resumed.rows:
        assert one["cell"] not in before or one == before[one["cell"]], "a finished cell keeps its row"
        assert ("timeouts.cell_s=900" in one["overrides"]) is (one["cell"] not in before)
        assert f"seed={one['seed']}," in one["cell"] or one["parallel"] == "fsdp2"
    record = json.loads((folder / "sweep.json").read_text())
    assert {PRETENDED, "timeouts.cell_s=900", "retry=0"} <= {*record["arguments"]}

    conf.write_text(EXPERIMENT.format(key="saves: 1"))
    changed = resume(folder, cwd=tmp_path)
    why = "resume: 6 cells again: its configuration has changed: saves was 2 and is 1"
    assert changed.err.splitlines()[:2] == ["resume: 0 of 6 cells are done", why]
    assert [one["cell"] for one in changed.rows] == names
    assert all("timeouts.cell_s=900" in one["overrides"] for one in changed.rows)
