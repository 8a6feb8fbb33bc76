"""A resumed sweep knows its cells by their identity, and its words by what they decide."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest

from conftest import blocks, run
from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import Rerun
from dcpbench.config.schema import config_class, is_how_run
from dcpbench.core.cell_key import HOW_RUN
from dcpbench.records.row import Row
from dcpbench.records.store import append_row, read_lines
from dcpbench.sweep import manifest, resume
from dcpbench.sweep.job import Job, Part
from dcpbench.sweep.manifest import command_line, defines_cells
from hydra_plugins.dcpbench_launcher.launcher import DcpbenchSweeper
from support.alone import config
from support.jobs import job
from support.pretended_engine import PRETENDED
from support.rows import row


def keys_of(kind: Any, prefix: str = "", how_run: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield every key of the schema, and whether it was declared `how_run`."""
    for item in fields(kind):
        hint = get_type_hints(kind)[item.name]
        own = how_run or bool(item.metadata.get(HOW_RUN))
        yield f"{prefix}{item.name}", own
        if inside := [one for one in (hint, *get_args(hint)) if is_dataclass(one)]:
            yield from keys_of(inside[0], f"{prefix}{item.name}.", own)


KEYS = dict(keys_of(config_class()))


def test_schema_tells_which_keys_are_how_run() -> None:
    assert {key for key in KEYS if is_how_run(key)} == {key for key, own in KEYS.items() if own} - {"repeat"}
    assert {"timeouts.cell_s", "timeouts", "load_parallel.gloo", "storage.root"} <= {
        *filter(is_how_run, KEYS)
    }
    assert not any(map(is_how_run, ("storage", "executor.hosts", "seed", "nothing", "timeouts_", "")))


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep that was started in another folder, from which it is resumed."""
    sweep, started = tmp_path / "sweep", tmp_path / "started"
    for folder in (sweep, started):
        folder.mkdir()
    words = ["parallel=ddp,fsdp2", "timeouts.cell_s=100"]
    manifest.Record(words, str(started), {"a": ["parallel=ddp"]}, []).write(sweep)
    monkeypatch.chdir(tmp_path)
    return sweep


def test_words_on_how_cells_run_follow_those_of_the_sweep(recorded: Path, tmp_path: Path) -> None:
    paths = {"storage.root": "ck", "known_failures": "a b.yaml", "nccl": "lib.so"}
    how = [key for key in KEYS if is_how_run(key) and key not in {*paths, "resume", "trust", "rerun", "part"}]
    given = [f"{key}=1" for key in how] + ["++retry=0", "executor.hosts=2", "--config-dir=own", "-m"]
    taken = command_line([f"resume={recorded}", *given, *(f"{key}='{path}'" for key, path in paths.items())])
    known = ["parallel=ddp,fsdp2", "timeouts.cell_s=100"]
    assert taken[:2] == known
    assert Path.cwd() == tmp_path / "started"
    assert [word for word in taken[2:] if word in given] == [
        word for word in given if word != "--config-dir=own"
    ]
    assert f"--config-dir={tmp_path}/own" in taken, "a path means what it meant where it was typed"
    read = [manifest._value_of(key, taken) for key in paths]
    assert read == [f"{tmp_path}/ck", f"{tmp_path}/a b.yaml", f"{tmp_path}/lib.so"]


@pytest.mark.parametrize(
    "word", ["seed=1", "parallel=ddp", "+model.options.x=1", "~fault", "repeat=1", "storage=s3"]
)
def test_words_on_cells_replace_those_of_the_sweep(word: str, recorded: Path, tmp_path: Path) -> None:
    assert defines_cells(word)
    taken = command_line(["retry=0", word, f"resume={recorded}"])
    assert taken[:2] == ["retry=0", word]
    assert "parallel=ddp,fsdp2" not in taken
    assert Path.cwd() == tmp_path


BLOCKS = {
    "checked": {"parallel": "ddp,fsdp2", "sharing": "correctness"},
    "timed": {"parallel": "ddp", "sharing": "none,disjoint", "timeouts.cell_s": 100, "repeats": 2},
}


def sweep_of(*words: str, resumed: Sequence[str] | None = None, cells: Sequence[str] = ()) -> list[str]:
    """The cells of an experiment, or of the sweep with the words `resumed` and these cells in its record."""
    sweeper = DcpbenchSweeper(None, BLOCKS)  # type: ignore[arg-type]
    repeats = next((int(word[-1]) for word in words if word.startswith("repeats=")), 1)
    settings: Any = SimpleNamespace(
        repeats=repeats, matrix="product", hydra=SimpleNamespace(runtime=SimpleNamespace(choices={}))
    )
    recorded = None if resumed is None else (resumed, [cell.split() for cell in cells])
    begun = SimpleNamespace(covering=itertools.product, folder=SimpleNamespace(recorded=recorded))
    sweeper._prepare(settings, None, begun)  # type: ignore[arg-type]
    return [" ".join(cell.overrides) for cell in sweeper._jobs([*words])]


def test_how_run_keys_change_cells_of_a_resumed_experiment() -> None:
    before = sweep_of("seed=3")
    assert len(before) == 2 + 4
    words = ["--config-dir=x", "seed=3"]
    after = sweep_of("seed=3", "timeouts.cell_s=900", "retry=0", resumed=words)
    new = "timeouts.cell_s=900 retry=0"
    assert after == [f"{cell.replace(' timeouts.cell_s=100', '')} {new}" for cell in before]
    assert len(sweep_of("seed=3", "sharing=correctness", resumed=words)) == 6, "it selects no block"
    assert sweep_of("seed=3", "sharing=none,disjoint", resumed=words) == before[2:], "a list still does"


def test_words_of_the_sweep_select_its_cells_again() -> None:
    words = ["seed=3", "sharing=correctness"]
    before = sweep_of(*words)
    assert len(before) == 2
    assert sweep_of("seed=3", "sharing=correctness", resumed=words) == before
    after = sweep_of(*words, "sharing=none", resumed=words)
    assert after == [f"parallel={name} seed=3 sharing=none" for name in ("ddp", "fsdp2")]


def test_same_words_give_the_recorded_cells() -> None:
    """Which an experiment that was edited, or has random seeds, does not give again."""
    words = ["seed=3"]
    before = ["parallel=hsdp seed=3 repeat=0", "parallel=ddp seed=4 sharing=none"]
    assert sweep_of(*words, resumed=words, cells=before) == before
    assert sweep_of(*words, resumed=words, cells=sweep_of(*words)[1:]) == sweep_of(*words)[1:]
    after = ["parallel=hsdp seed=3 repeat=0 sharing=disjoint", "parallel=ddp seed=4 sharing=disjoint"]
    assert sweep_of(*words, "sharing=disjoint", resumed=words, cells=before) == after
    for more in ("seed=5", "saves=1", "repeats=3", "retry=0,1"):
        assert sweep_of(*words, more, resumed=words, cells=before) == sweep_of(*words, more)


def asked(name: str, words: str, **values: Any) -> Job:
    made = job(config(**values))
    made.cell.overrides = words.split()
    return made.called(name)


def named(jobs: Sequence[Job], before: Sequence[Job]) -> list[str]:
    """The names by which jobs are recognized as those of an earlier sweep, whose configurations are composed
    from the recorded words."""
    record = manifest.Record([], "/", {one.cell.name: one.cell.overrides for one in before}, [])
    composed = {tuple(one.cell.overrides): one.config for one in before if one.cell.name != "gone"}
    found = resume.recognized(jobs, record, lambda words: composed.get(tuple(words)), "resume=x")
    assert all(one.columns["cell"] == one.cell.name == one.cell.folder.name for one in found)
    return [one.cell.name for one in found]


def test_cells_are_recognized_in_any_order_and_spelling() -> None:
    before = [
        asked("one", "parallel=ddp seed=0x3", parallel="ddp", seed=3),
        asked("two", "parallel=fsdp2", parallel="fsdp2"),
        asked("three", "parallel=fsdp2 repeat=1", parallel="fsdp2", repeat=1),
    ]
    now = [
        asked(
            "a",
            "timeouts.cell_s=9 parallel=fsdp2 repeat=1",
            parallel="fsdp2",
            repeat=1,
            timeouts={"cell_s": 9},
        ),
        asked("b", "seed=3 parallel=ddp", parallel="ddp", seed=3),
        asked("c", "parallel=fsdp2 seed=0 retry=0", parallel="fsdp2", retry=0),
    ]
    assert named(now, before) == ["three", "one", "two"]


def test_equal_cells_keep_apart_by_how_they_run() -> None:
    how = [{}, {"sharing": "correctness"}, {"sharing": "correctness", "timeouts": {"cell_s": 9.0}}]
    before = [asked(f"cell {n}", f"n={n}", **values) for n, values in enumerate(how)]
    now = [asked(f"now {n}", f"m={n}", retry=0, **values) for n, values in enumerate(how)]
    assert len({one.run for one in (*before, *now)}) == 1
    for order in itertools.permutations(range(3)):
        assert named([now[n] for n in order], before) == [f"cell {n}" for n in order]
    same = [asked(f"now {n}", "m=0", sharing="none") for n in range(3)]
    assert sorted(named(same, before)) == ["cell 0", "cell 1", "cell 2"]


DDP, FSDP2 = asked("ddp", "parallel=ddp", parallel="ddp"), asked("fsdp2", "parallel=fsdp2", parallel="fsdp2")
AGAIN = asked("again", "parallel=ddp sharing=none", parallel="ddp", sharing="none")


@pytest.mark.parametrize(
    ("now", "says"),
    [
        ([DDP, asked("a", "optimizer=sgd", optimizer="sgd")], "it has no cell with optimizer=sgd ("),
        ([asked("a", "seed=0 saves=9", seed=0, saves=9, parallel="ddp")], "it has no cell with saves=9 ("),
        ([asked("a", "", parallel="ddp", compile=True)], "it has no cell with compile=true ("),
        ([asked("a", "save_at=1", parallel="ddp", save_at=1)], "it has no cell with save_at=1 ("),
        ([DDP, asked("a", "", parallel="fsdp2", repeat=1)], "it has no cell with repeat=1 ("),
        ([DDP], "these words give no cell with parallel=fsdp2 (2 cells there, 1 here); pass all words"),
        ([DDP, AGAIN, FSDP2], "it has cells that differ only in how they run, and these words give another"),
    ],
)  # fmt: skip
def test_other_cells_are_refused_by_their_keys(now: list[Job], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        named(now, [DDP, FSDP2])
    assert str(refused.value).startswith(f"resume=x: is another matrix: {says}")


def test_cells_that_cannot_be_composed_are_others() -> None:
    gone = asked("gone", "model=mine")
    with pytest.raises(ConfigError, match="is another matrix: these words give no cell gone"):
        named([DDP], [DDP, gone])
    with pytest.raises(ConfigError, match="it has no cell with parallel=ddp "):
        named([DDP], [gone])


def test_new_combination_is_told_by_what_varies() -> None:
    values = [{"parallel": parallel, "seed": seed} for parallel in ("ddp", "fsdp2") for seed in (1, 2)]
    cells = [
        asked(str(n), f"parallel={one['parallel']} seed={one['seed']}", **one) for n, one in enumerate(values)
    ]
    with pytest.raises(ConfigError, match="it has no cell with parallel=fsdp2 seed=2 "):
        named(cells, cells[:3])


def row_of(one: Job, **values: Any) -> Row:
    about = {"cell": one.cell.name, "repeat": one.config.repeat, "config_digest": one.key.digest}
    return row(**{**about, "expected_digest": "e", "code_digest": "c", "torch_version": "t", **values})


def test_rows_are_valid_by_the_identity_of_their_cell(tmp_path: Path) -> None:
    known = {"expected_digest": "e", "code_digest": "c", "torch_version": "t", "dcpbench_commit": None}
    jobs = [
        Job(
            one.cell, one.config, one.key, None, (), {**one.columns, **known, "config_digest": one.key.digest}
        )
        for one in (DDP, AGAIN, FSDP2)
    ]
    append_row(tmp_path, row_of(FSDP2, cell="an earlier name"))
    append_row(tmp_path, row_of(AGAIN))
    append_row(tmp_path, row_of(DDP, cell="elsewhere", config_digest="of no cell"))
    append_row(tmp_path, row_of(DDP, config_digest="of another configuration"))
    found = resume.look(tmp_path, read_lines(tmp_path), jobs, Rerun.none)
    assert found.standing.keys() == {"fsdp2", "again"}, "of two equal cells the one that has the row's name"
    assert len(found.superseded) == 2
    assert found.sentences(3)[1:] == [
        "resume: 1 cell again: the configuration, or the list of known failures, has changed",
        "resume: 1 row of no cell of this sweep; moved away",
    ]


def test_record_whose_cells_are_no_folders_is_refused(tmp_path: Path) -> None:
    for name in ("../x", "..", "a/b", ""):
        manifest.Record([], "/", {"a": [], name: []}, []).write(tmp_path)
        with pytest.raises(ConfigError, match=r"sweep\.json was not written by a sweep"):
            manifest.read(tmp_path)


def test_parts_are_dealt_out_by_identity() -> None:
    jobs = [asked(f"seed={n}", f"parallel=ddp seed={n}", seed=n) for n in range(8)]
    mine = {one.run for one in Part(1, 3).jobs(jobs)}
    other = [
        asked(f"{n}", f"timeouts.cell_s={9 - n} seed={n}", seed=n, timeouts={"cell_s": 9 - n})
        for n in range(8)
    ]
    random.Random(0).shuffle(other)
    assert {one.run for one in Part(1, 3).jobs(other)} == mine
    assert len(mine) == 3


@pytest.mark.slow
def test_sweep_is_resumed_by_other_words_for_its_cells(tmp_path: Path) -> None:
    """In another order and spelling, and with words that change how the cells run that are left."""
    folder = tmp_path / "sweep"
    small = ("world_size=1", "saves=1", "device=cpu", PRETENDED)
    matrix = blocks(
        [
            {"parallel": "none,ddp", "sharing": "correctness", "timeouts.cell_s": 200},
            {"parallel": "none", "repeats": 2, "sharing": "none"},
        ]
    )
    before = run(folder, *small, "compile=False", *matrix)
    assert before.status == 0, before.err
    names = [item["cell"] for item in before.rows]
    runs = [(item["config_digest"], item["repeat"]) for item in before.rows]
    assert len(runs) == 4 > len({*runs}), "two cells differ only in how they run"
    lines = (folder / "results.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "results.jsonl").write_bytes(lines[0] + lines[3])
    done = {json.loads(lines[0])["cell"], json.loads(lines[3])["cell"]}
    more = ("timeouts.cell_s=900", "retry=0", f"resume={folder}")
    ended = run(folder, *matrix, "seed=0", "compile=off", *more, *reversed(small))
    assert ended.status == 0, ended.err
    assert "resume: 2 of 4 cells are done" in ended.err
    assert [item["cell"] for item in ended.rows] == names
    assert {item.name for item in folder.iterdir() if item.is_dir()} == {*names}
    again = {item["cell"] for item in ended.rows if "timeouts.cell_s=900" in item["overrides"]}
    assert again == {*names} - done
    kept = (folder / "results.jsonl").read_bytes().splitlines(keepends=True)
    assert {lines[0], lines[3]} <= {*kept}
