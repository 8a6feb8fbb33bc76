"""A resumed sweep runs its recorded cells; words that are typed say how."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from conftest import Finished, dcpbench, resume
from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import is_how_run, schema_class
from dcpbench.core.cell_key import HOW_RUN
from dcpbench.plan.plan import PlannedCell
from dcpbench.records.row import Row
from dcpbench.records.store import append_row, read_lines
from dcpbench.sweep.folder import SweepRecord
from dcpbench.sweep.request import value_of
from dcpbench.sweep.valid_rows import valid_rows
from support.alone import config
from support.jobs import job
from support.pretended_engine import PRETENDED
from support.requests import request
from support.rows import row


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


@pytest.mark.parametrize("word", ["executor.hosts=2", "sharing=none,disjoint", "executor.address=b:2"])
def test_resumed_sweep_has_its_recorded_words(word: str, recorded: Path, tmp_path: Path) -> None:
    taken = request([word], resume=recorded).words
    key = word.partition("=")[0]
    assert taken[: len(WORDS)] == [word if one.startswith(f"{key}=") else one for one in WORDS]
    assert Path.cwd() == tmp_path / "started"


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


def asked(name: str, words: str, **values: Any) -> PlannedCell:
    made = job(config(**values))
    columns = {**made.columns, "cell": name}
    return replace(made, name=name, overrides=words.split(), folder=Path(name), columns=columns)


DDP, FSDP2 = asked("ddp", "parallel=ddp", parallel="ddp"), asked("fsdp2", "parallel=fsdp2", parallel="fsdp2")


def row_of(one: PlannedCell, **values: Any) -> Row:
    about = {"cell": one.name, "repeat": one.config.repeat, "config_digest": one.key.digest}
    about |= {"config": dict(one.key.values), "expected_digest": "e", "code_digest": "c"}
    return row(**{**about, "torch_version": "t", **values})


def test_rows_are_valid_by_the_run_of_their_cell(tmp_path: Path) -> None:
    known = {"expected_digest": "e", "code_digest": "c", "torch_version": "t", "dcpbench_commit": None}
    before = asked("grown", "", parallel="ddp", seed=3, saves=2)
    jobs = [
        replace(one, columns={**one.columns, **known})
        for one in (DDP, FSDP2, asked("grown", "", parallel="fsdp2", seed=3, save_at=0))
    ]
    append_row(tmp_path, row_of(FSDP2, cell="an earlier name"))
    append_row(tmp_path, row_of(DDP, cell="elsewhere", config_digest="of no cell"))
    append_row(tmp_path, row_of(DDP, repeat=1))
    append_row(tmp_path, row_of(before))
    append_row(tmp_path, row_of(DDP, expected_digest="f"))
    found = valid_rows(read_lines(tmp_path), jobs, False, {})
    assert [*found.lines] == [FSDP2.run]
    assert len(found.superseded) == 4
    assert found.sentences(3)[1:] == [
        "resume: 1 cell again: its configuration has changed: repeat was 1 and is 0",
        "resume: 1 cell again: its configuration has changed: "
        "parallel was ddp and is fsdp2, saves was 2 and is 3, save_at was null and is 0",
        "resume: 1 cell again: its known failures, or what has to detect its fault, have changed",
        "resume: 1 row of no cell of this sweep; moved away",
    ]


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


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A sweep of an experiment with random seeds and repeats, of which a word selected, half done."""
    place = tmp_path_factory.mktemp("recorded")
    (place / "conf/experiment").mkdir(parents=True)
    (place / "conf/experiment/mine.yaml").write_text(EXPERIMENT.format(key="saves: 2"))
    words = ("--config-dir=conf", "experiment=mine", "device=cpu", "world_size=1", "sharing=correctness,none")
    folder = place / "sweep"
    ended = dcpbench(
        "run", *words, PRETENDED, "timeouts.cell_s=100", f"hydra.sweep.dir={folder}", folder=folder, cwd=place
    )
    assert len(ended.rows) == 6, ended.err
    lines = (folder / "results.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "results.jsonl").write_bytes(b"".join(lines[::2]))
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("is_edited", [True, False])
def test_recorded_cells_of_an_experiment_run_again(
    is_edited: bool, experiment: Finished, tmp_path: Path
) -> None:
    """With random seeds, after its blocks were edited, by words that were not typed again."""

    folder = tmp_path / "sweep"
    shutil.copytree(experiment.folder, folder)
    conf = experiment.folder.parent / "conf/experiment/mine.yaml"
    names = [*json.loads((folder / "sweep.json").read_text())["cells"]]
    before = {one["cell"]: one for one in experiment.rows}
    text = EXPERIMENT.format(key="saves: 2")
    conf.write_text(text.replace("none,ddp", "fsdp") if is_edited else text)
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
