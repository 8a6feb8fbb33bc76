"""Runs of a sweep in trackers, read back with the packages of the trackers."""

import json
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import tiered
from dcpbench.plugins.trackers.log import logged_sweep
from dcpbench.records.store import append_row, keep_lines, read_lines, write_json
from support.commands import main, python
from support.rows import row

Told = dict[str, dict[str, Any]]
"""The merged parameters, metrics and tags of each run in a tracker."""

_TRACKERS = ("tensorboard", "mlflow", "wandb")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "a night"
    folder.mkdir()
    write_json(folder / "environment.json", {"torch": "2.13.0", "gpus": ["H200"], "cuda": None})
    at = "2026-11-20T01:02:0{}+00:00"
    append_row(
        folder,
        row(
            cell="one,repeat=1", repeat=1, started_at=at.format(1), torch_version="2.13.0", cell_s=2.5,
            save_s=0.25, loss_twin=float("nan"), checkpoint_bytes=7, model_equal=True, dcpbench_commit="abc",
        ),
    )  # fmt: skip
    append_row(
        folder, row(cell="two", status="fail", reason="a\nb", started_at=at.format(5), model_equal=False)
    )
    return folder


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test on a connection to another machine."""
    real = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"), address
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def test_cells_end_after_their_seconds(tmp_path: Path) -> None:
    at = "2026-11-20T01:02:03+00:00"
    for name, times in (("a", {"cell_s": 2.5}), ("b", {"shared_cell_s": 4.25}), ("c", {})):
        append_row(tmp_path, row(cell=name, started_at=at, **times))
    cells = logged_sweep(tmp_path, {}).cells
    assert [cell.ended_s - cell.started_s for cell in cells] == [2.5, 4.25, 0]


def in_tensorboard(folder: Path) -> Told:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    told: Told = {}
    for path in folder.rglob("*tfevents*"):
        events = EventAccumulator(str(path.parent)).Reload()
        content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        params = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
        values = {
            tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]
        }
        assert all(len(points) == 1 for points in values.values()), values
        about = events.Tensors("about")[0].tensor_proto.string_val[0].decode()
        told[path.parent.name] = {
            **{name: value.string_value for name, value in params.items()},
            **{tag: points[0][1] for tag, points in values.items()},
            **dict(line.strip("| ").split(" | ", 1) for line in about.splitlines()[2:]),
            "step": next(iter(values.values()))[0][0],
        }
    return told


def in_mlflow(folder: Path) -> Told:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert parent.info.run_name == "a night"
    assert parent.data.tags["gpus"] == "['H200']"
    cells = [run for run in runs if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in cells} == {parent.info.run_id}
    for run in cells:
        assert run.info.status == ("FINISHED" if run.data.tags["status"] == "pass" else "FAILED")
    return {
        run.info.run_name: {**run.data.params, **run.data.metrics, **run.data.tags, "at": run.info.start_time}
        for run in cells
    }


def in_wandb(folder: Path) -> Told:
    from wandb.proto import wandb_internal_pb2

    told: Told = {}
    for path in folder.rglob("*.wandb"):
        records = [wandb_internal_pb2.Record.FromString(one) for one in log_records(path.read_bytes())]
        (run,) = {one.run.display_name: one.run for one in records if one.HasField("run")}.values()
        assert run.display_name not in told
        told[run.display_name] = {item.key: json.loads(item.value_json) for item in run.config.update}
        for one in records:
            for item in one.summary.update:
                told[run.display_name][item.key or item.nested_key[0]] = json.loads(item.value_json)
        told[run.display_name] |= {"group": run.run_group, "tags": list(run.tags)}
        assert (path.parent / "logs").is_dir()
    return told


def log_records(file: bytes) -> Iterator[bytes]:
    """Read a .wandb file: records of LevelDB's log format (its doc/log_format.md), whose first
    block begins with 7 bytes of wandb's own."""
    block, offset, record = 32768, 7, b""
    while offset + 7 <= len(file):
        if block - offset % block < 7:
            offset += block - offset % block
            continue
        _, length, kind = struct.unpack_from("<IHB", file, offset)
        record += file[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a complete record, or the last part of one
            yield record
            record = b""


_READ: dict[str, Callable[[Path], Told]] = {
    "tensorboard": in_tensorboard,
    "mlflow": in_mlflow,
    "wandb": in_wandb,
}


@pytest.mark.trackers
@pytest.mark.parametrize("tracker", _TRACKERS)
def test_logged_values_equal_the_rows(
    tracker: str, sweep: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "a b" if tracker == "tensorboard" else "a\nb"  # a table's row is one line
    there = tmp_path / "there"
    words = ["log", str(sweep), "--to", tracker, "--dir", str(there)]
    assert main(words) == 0
    out, err = capfd.readouterr()
    assert out.splitlines()[0] == f"{sweep}: 2 cells logged"
    assert len(out.splitlines()) == 2, "the tracker itself says nothing"
    assert "wandb" not in err
    told = _READ[tracker](there)
    assert set(told) == {"one,repeat=1", "two"}
    one, two = told["one,repeat=1"], told["two"]
    named = ("parallel", "repeat", "status", "dcpbench_commit")
    assert [one[name] for name in named] == ["ddp", "1", "pass", "abc"]
    assert (one["save_s"], one["checkpoint_bytes"], one["model_equal"]) == (0.25, 7, 1)
    assert "loss_twin" not in one, "what is no number is left out"
    assert "save_s" not in two, "and so is what was not measured"
    assert (two["status"], two["reason"], two["model_equal"]) == ("fail", said, 0)
    assert one["torch"] == "2.13.0"
    assert "cuda" not in one
    if tracker == "tensorboard":
        assert one["step"] == 1
    if tracker == "mlflow":
        assert one["at"] == 1763600521000 + 365 * 86400_000

    # Once more, and nothing is there twice; a cell that has run again replaces what it had said.
    assert main(words) == 0
    assert "0 cells logged, 2 already logged" in capfd.readouterr().out
    assert _READ[tracker](there) == told
    lines = list(read_lines(sweep))
    keep_lines(sweep, lines[1:], take_out=lines[:1])
    append_row(sweep, row(cell="one,repeat=1", started_at="2026-11-21T00:00:00+00:00", save_s=0.5))
    assert main(words) == 0
    assert "0 cells logged, 1 replaced after running again, 1 already logged" in capfd.readouterr().out
    again = _READ[tracker](there)
    assert again["one,repeat=1"]["save_s"] == 0.5
    assert again["two"]["reason"] == said
    assert len(again) == 2


@pytest.mark.trackers
@pytest.mark.parametrize("tracker", _TRACKERS)
def test_sweeps_of_one_name_are_separate(tracker: str, sweep: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / sweep.name
    other.mkdir(parents=True)
    append_row(other, row(cell="two", started_at="2026-11-19T00:00:00+00:00", save_s=9.0))
    there = tmp_path / "there"
    for _ in range(2):
        words = ["log", str(sweep), str(other), "--to", tracker, "--dir", str(there), "--project", "p"]
        assert main(words) == 0
    files = {"tensorboard": "*tfevents*", "wandb": "*.wandb"}
    if tracker in files:
        assert len(list(there.rglob(files[tracker]))) == 3
    else:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{there / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("p")
        assert experiment is not None
        assert len(client.search_runs([experiment.experiment_id])) == 2 + 3


@pytest.mark.trackers
def test_cell_named_like_a_path_removes_nothing(tmp_path: Path) -> None:
    """Names in rows of another user are absolute, with `..`, empty, or not valid in a file system."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis").write_text("mine")
    night, there = tmp_path / "night", tmp_path / "there"
    night.mkdir()
    runs = there / "dcpbench"
    names = [str(mine), "../../../mine", "..", ".", "", ".part", "a/b", "a\0b", "a" * 300, "plain,seed=1"]
    for name in names:
        append_row(night, row(cell=name, started_at="2026-11-20T01:02:00+00:00", save_s=0.25))
    words = ["log", str(night), "--to", "tensorboard", "--dir", str(there)]
    assert main(words) == 0
    assert (mine / "thesis").read_text() == "mine"
    assert [path.name for path in mine.iterdir()] == ["thesis"]
    (run,) = runs.iterdir()
    found = {path.name for path in run.iterdir()}
    assert len(found) == len(names), "each cell is logged"
    assert "plain,seed=1" in found
    assert main(words) == 0, "and found again"
    assert {path.name for path in run.iterdir()} == found


@pytest.mark.slow
@pytest.mark.parametrize("tracker", tiered(_TRACKERS, "wandb"))
def test_missing_tracker_package_prints_one_line(tracker: str, sweep: Path, tmp_path: Path) -> None:
    hides = f"import sys; sys.modules['{tracker}'] = None; from dcpbench.cli.commands import main; "
    asked = ["log", str(sweep), "--to", tracker, "--dir", str(tmp_path / "there")]
    done = python("-c", hides + "sys.exit(main(sys.argv[1:]))", *asked)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"pip install 'dcpbench[{tracker}]'")
    assert not (tmp_path / "there").exists()


@pytest.mark.trackers
def test_folder_without_results_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", str(tmp_path), "--to", "tensorboard", "--dir", str(tmp_path / "there")]) == 2
    assert "no sweep here" in capsys.readouterr().err


def test_unknown_tracker_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", ".", "--to", "nowhere"]) == 2
    said = capsys.readouterr().err
    assert "'nowhere' is not one of 'tensorboard'" in said
    assert said.count("\n") == 1
