"""A metric, a check and an axis that a plug-in declares, once each, are where built-in ones are."""

import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from conftest import SMALL, Finished, run
from dcpbench.core.axes import AXES
from dcpbench.core.checks import CHECKS
from dcpbench.core.metrics import METRICS
from dcpbench.core.plugins import load_plugins
from support.drivers import environment

pytestmark = pytest.mark.slow

PLUGIN = """
from dcpbench.core.axes import AxisSpec
from dcpbench.core.plugins import API, Plugin
from dcpbench.core.checks import CheckSpec
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.metrics import MetricSpec
from dcpbench.core.rank_report import Compared


def descriptors(cell):
    import os
    return float(len(os.listdir("/proc/self/fd")))


def verify_float32(cell, target, checkpoint):
    import torch

    def wrong(dtype):
        parameters = target.model.named_parameters()
        return [Mismatch(name, Problem.dtype, facts={"expected": dtype, "actual": value.dtype})
                for name, value in parameters if value.dtype != dtype]

    names, where = [name for name, _ in target.model.named_parameters()], str(checkpoint)
    cell.record("float32_kept", Compared.of(wrong(torch.float32), wrong(torch.float64), names), where)


def clip(cell, run):
    assert cell.config.clip == 3


plugin = Plugin(
    name="mine",
    api=API,
    axes=(AxisSpec("clip", "the norm that gradients are clipped to", type=int),),
    checks=(CheckSpec("float32_kept", "every parameter is float32", probe=verify_float32),),
    metrics=(MetricSpec("load_descriptors", "open descriptors at the end of a load", "max", phase="load",
                        shown="always", compared="always", history=True, probe=descriptors),),
    built=("mine_plugin:clip",),
)
"""


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Finished, Finished]]:
    place = tmp_path_factory.mktemp("plugins")
    (place / "mine_plugin.py").write_text(PLUGIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCPBENCH_PLUGINS", "mine_plugin")
        patch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
        patch.syspath_prepend(place)
        load_plugins()  # to read the rows
        asked = ("-m", "parallel=ddp,fsdp2", "clip=3", "saves=1", "device=cpu", "world_size=2", *SMALL)
        old, new = (run(place / name, *asked, own_process=name == "old") for name in ("old", "new"))
        yield place, old, new
    for registry, name in ((AXES, "clip"), (CHECKS, "float32_kept"), (METRICS, "load_descriptors")):
        registry.pop(name)


def report(place: Path, *words: str | Path) -> str:
    """Return the output of a command, of `report` if none is named, with the plug-in."""
    named = [] if words[0] in ("compare", "history") else ["report"]
    program = [sys.executable, "-m", "dcpbench", *named, *map(str, words)]
    variables = environment(place, DCPBENCH_PLUGINS="mine_plugin")
    return subprocess.run(program, capture_output=True, text=True, check=True, env=variables).stdout


def test_they_are_columns_of_the_row_and_of_the_csv(sweeps: tuple[Path, Finished, Finished]) -> None:
    _, old, new = sweeps
    for ended in (old, new):
        assert [row["status"] for row in ended.rows] == ["pass", "pass"], ended.out + ended.err
        assert all(row["float32_kept"] is True for row in ended.rows)
        assert all(row["clip"] == row["config"]["clip"] == 3 for row in ended.rows)
        assert all(row["load_descriptors"] > 3 for row in ended.rows)
        with (ended.folder / "results.csv").open(newline="") as read:
            flat = list(csv.DictReader(read))
        assert [row["float32_kept"] for row in flat] == ["True", "True"]
        assert [row["clip"] for row in flat] == ["3", "3"]
        assert all(float(row["load_descriptors"]) > 3 for row in flat)
        assert row_details(ended)["control_missed"] == []


def row_details(ended: Finished) -> dict[str, object]:
    details: dict[str, object] = ended.rows[0]["details"]["checks"]["float32_kept"]
    return details


def test_each_rank_measured_it_after_each_load(sweeps: tuple[Path, Finished, Finished]) -> None:
    _, _, new = sweeps
    measured = pd.read_json(new.folder / "measurements.jsonl", lines=True)
    probed = measured[measured["metric"] == "load_descriptors"]
    assert set(probed["rank"]) == {0, 1}
    assert set(probed["phase"]) == {"load"}
    largest = probed.groupby("cell")["value"].max()
    assert {row["cell"]: row["load_descriptors"] for row in new.rows} == largest.to_dict()


def test_they_are_in_the_table_and_on_the_page(sweeps: tuple[Path, Finished, Finished]) -> None:
    place, _, new = sweeps
    for table in (new.out, report(place, new.folder)):
        head = next(line for line in table.splitlines() if " status " in line)
        assert "load_descriptors" in {word.strip() for word in head.split("  ")}
        made = new.rows[0]["details"]["checks"]
        assert "float32_kept" in made
        assert f" {len(made)} passed" in table
    pivot = report(place, new.folder, "--metric", "load_descriptors")
    assert pivot.startswith("load_descriptors by parallel")


def test_an_axis_is_a_key_with_help(sweeps: tuple[Path, Finished, Finished]) -> None:
    place, _, new = sweeps
    variables = environment(place, DCPBENCH_PLUGINS="mine_plugin")
    program = [sys.executable, "-m", "dcpbench", "run", "--help"]
    helped = subprocess.run(program, capture_output=True, text=True, check=True, env=variables).stdout
    assert "clip=null  " in helped
    assert "the norm that gradients are clipped to" in helped
    assert "2 of 2 rows" in report(place, new.folder, "--where", "clip=3", "--cells")
    assert (
        "clip"
        not in subprocess.run(
            program, capture_output=True, text=True, check=True, env=environment(DCPBENCH_PLUGINS="")
        ).stdout
    )


def test_compare_and_history_have_the_metric(sweeps: tuple[Path, Finished, Finished]) -> None:
    place, old, new = sweeps
    compared = report(place, "compare", old.folder, new.folder)
    assert "load_descriptors: 2 " in compared
    assert "load_descriptors" in report(place, "history", place, "--all")


def test_without_the_plug_in_its_columns_hide_no_other(sweeps: tuple[Path, Finished, Finished]) -> None:
    _, _, new = sweeps
    program = [sys.executable, "-m", "dcpbench", "report", str(new.folder)]
    variables = environment(DCPBENCH_PLUGINS="")
    plain = subprocess.run(program, capture_output=True, text=True, check=True, env=variables).stdout
    assert "2 cells: 2 pass" in plain
    assert "load_descriptors" not in plain


def test_a_plug_in_that_cannot_be_imported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCPBENCH_PLUGINS", "no_such_plugin")
    ended = run(tmp_path / "sweep", "parallel=none", "device=cpu")
    assert ended.status == 2
    (line,) = ended.err.strip().splitlines()
    assert line.startswith("dcpbench: plug-in no_such_plugin cannot be imported: ModuleNotFoundError")
    assert line.endswith("; add its folder to PYTHONPATH")
    assert not ended.folder.exists()
