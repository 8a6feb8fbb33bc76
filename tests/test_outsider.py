"""Another user's package adds one of everything, by its entry point; an absent plug-in is a line."""

import csv
import json
import os
import re
from pathlib import Path

import pytest

from conftest import Finished, dcpbench
from support.commands import python
from support.drivers import environment

pytestmark = pytest.mark.slow

_EXTENDING = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
NORMS = re.findall(r"<!-- file: mine/checks.py -->\n```python\n(.*?)```", _EXTENDING, re.DOTALL)[0].replace(
    "norms_kept", "theirs_norms"
)
"""The check of docs/extending.md, under a name of the outsider."""

FILES = {
    "outsider-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: outsider\nVersion: 1.0\n",
    "outsider-1.0.dist-info/entry_points.txt": "[dcpbench]\noutsider = outsider.plugin\n",
    "outsider/__init__.py": "",
    "outsider/plugin.py": """
from pathlib import Path

from dcpbench.api import AxisSpec, CheckSpec, CommandSpec, MetricSpec, Plugin
from outsider.norms import verify_norms


def descriptors(cell):
    import os
    return float(len(os.listdir("/proc/self/fd")))


plugin = Plugin(
    name="outsider",
    api=1,
    conf=Path(__file__).parent / "conf",
    columns=(
        CheckSpec("theirs_held", "what the outsider looks at holds"),
        CheckSpec("theirs_norms", "norms are those of the save", probe=verify_norms),
        AxisSpec("theirs_clip", "the norm that gradients are clipped to", type=int),
        MetricSpec("theirs_calls", "calls of the outsider's scenario", counted=True),
        MetricSpec("theirs_open", "open descriptors", "max", phase="load", shown="always", probe=descriptors),
    ),
    values={"fault": "outsider.faults:faults"},
    hooks={"run": "outsider.code:clip", "checkpointer": "outsider.code:doubling"},
    defects={"doubled": "outsider.defects:doubled"},
    commands={"greet": CommandSpec("say who is there", "outsider.command:greet")},
    sections=("outsider.page:section",),
)
""",
    "outsider/norms.py": NORMS,
    "outsider/code.py": """
from dcpbench.api import Compared, Mismatch, Problem
from dcpbench.scenarios import save_load
from dcpbench.workloads import parallelisms


def parallel(model, mesh, config):
    return parallelisms.ddp(model, mesh, config)


def clip(cell, run):
    assert cell.config.theirs_clip in (None, 3)


def doubling(cell, checkpointer):
    honest = checkpointer.load

    def load(state, checkpoint_id):
        honest(state, checkpoint_id)
        if "train_state" in state:
            state["train_state"].current_loss *= times

    if times := cell.config.scenario.options.get("times"):
        checkpointer.load = load


def scenario(cell, broken, times):
    save_load.save_load(cell)
    cell.measure("theirs_calls", 1)
    found = [Mismatch("theirs", Problem.value)] if broken else []
    control = [Mismatch("theirs", Problem.value)]
    cell.record("theirs_held", Compared.of(found, control, ["theirs"]), "at the end")
""",
    "outsider/defects.py": """
from dcpbench.api import Defect

NAME = ("train_state", "current_loss")


def expected(cell, moment, reference):
    saved = reference.checkpoint.state["extra"][NAME]
    yield {"extra": {NAME: 2 * saved}}


doubled = Defect(("restored",), lambda config: config.scenario.name == "theirs", expected)
""",
    "outsider/faults.py": """
from dcpbench.api import Expect, fault, faults


@fault(Expect("model_equal", r"net1\\.weight"))
def theirs(target):
    target.largest("model.net1.weight").mul_(2)
""",
    "outsider/command.py": """
import click


@click.command()
def greet():
    click.echo("the outsider is here")
""",
    "outsider/page.py": """
def section(frame):
    return "Seen by <the outsider>", frame[["cell", "theirs_held"]]
""",
    "outsider/conf/known_failures.yaml": """
- id: theirs
  cells: {scenario: theirs, scenario.options.broken: true}
  torch: ">=2"
  checks: {theirs_held: [{name: theirs, problems: [value]}]}
  reason: it is broken
- id: doubled
  cells: {scenario: theirs, scenario.options.times: [2, 3]}
  torch: ">=2"
  checks: {extra_equal: [{name: train_state.current_loss, problems: [value], by: doubled}]}
  reason: a load doubles it
""",
    "outsider/conf/parallel/theirs.yaml": """\
# DDP of the outsider.
name: theirs
target: outsider.code.parallel
mesh: [dp_replicate]
dp_replicate: -1
""",
    "outsider/conf/scenario/theirs.yaml": """\
# save_load, and what the outsider looks at.
name: theirs
target: outsider.code.scenario
options: {broken: false, times: null}
""",
    "outsider/conf/experiment/theirs.yaml": """\
# @package _global_
# One of everything.
device: cpu
world_size: 1
saves: 1
train_steps: 1
resume_steps: 1
retry: 0
hydra:
  sweeper:
    matrix:
      cells: {scenario: theirs, model: short, parallel: theirs, scenario.options.broken: "false,true"}
      fault: {scenario: save_load, model: short, parallel: theirs, fault: theirs, plugin: faults}
      doubled: {scenario: theirs, model: short, parallel: theirs, scenario.options.times: "2,3"}
      other_layout:
        {scenario: convert, model: short, parallel: ddp, load_parallel: fsdp2, world_size: 2, theirs_clip: 3}
      left_out: {scenario: save_load, parallel: ddp, plugin: nowhere}
""",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def ended(place: Path) -> Finished:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
        conf = ("--config-dir", str(Path(__file__).parent / "conf"))
        sweep = place / "sweep"
        words = (*conf, "experiment=theirs", f"hydra.sweep.dir={sweep}")
        return dcpbench(*words, folder=sweep, own_process=True)


def test_one_of_everything_runs(ended: Finished) -> None:
    assert [(row["status"], row["parallel"], row["fault_seen"]) for row in ended.rows] == [
        ("pass", "theirs", None),
        ("xfail", "theirs", None),
        ("fail", "theirs", True),
        ("xfail", "theirs", None),
        ("fail", "theirs", None),
        ("pass", "ddp", None),
    ], ended.out + ended.err
    written = map(json.loads, (ended.folder / "results.jsonl").read_text().splitlines())
    assert [(row["theirs_held"], row["theirs_calls"]) for row in written] == [
        (True, 1),
        (False, 1),
        (None, None),
        (True, 1),
        (True, 1),
        (None, None),
    ]
    assert "known failure theirs" in ended.rows[1]["reason"]
    assert "known failure doubled" in ended.rows[3]["reason"]
    assert "train_state.current_loss" in ended.rows[4]["reason"], "three times as large is another defect"
    assert ended.status == 1


def test_a_check_compares_saved_values(ended: Finished) -> None:
    """Under DDP, whose names have a prefix, and under FSDP2, another layout than that of the save."""
    written = map(json.loads, (ended.folder / "results.jsonl").read_text().splitlines())
    norms = [row["theirs_norms"] for row in written]
    assert norms == [True, True, False, True, True, True], "the third has a fault in net1.weight"
    details = map(json.loads, (ended.folder / "details.jsonl").read_text().splitlines())
    for row in details:
        controls = row["details"]["checks"]["theirs_norms"]["control"]
        assert {name.split(" in ")[0] for name in controls} == {
            f"net{number}.{kind}" for number in (1, 2) for kind in ("weight", "bias")
        }
        assert all(controls.values())


def test_axes_and_metrics_are_in_rows_and_files(ended: Finished) -> None:
    rows = [*csv.DictReader((ended.folder / "results.csv").read_text().splitlines())]
    assert [row["theirs_clip"] for row in rows] == ["", "", "", "", "", "3"]
    measured = [json.loads(line) for line in (ended.folder / "measurements.jsonl").read_text().splitlines()]
    opened = [one for one in measured if one["metric"] == "theirs_open"]
    assert ({one["rank"] for one in opened}, {one["phase"] for one in opened}) == ({0, 1}, {"load"})
    for row in rows:
        largest = max(one["value"] for one in opened if one["cell"] == row["cell"])
        assert float(row["theirs_open"]) == largest > 3
    assert "theirs_open" in next(line for line in ended.out.splitlines() if " status " in line)


def test_an_absent_plug_in_is_one_line(ended: Finished) -> None:
    (line,) = (line for line in ended.err.splitlines() if "absent" in line)
    assert line == "dcpbench: plug-in nowhere is absent: block left_out of the experiment is left out"


def test_the_page_has_the_section(ended: Finished) -> None:
    page = (ended.folder / "report.html").read_text()
    assert "<h2>Seen by &lt;the outsider&gt;</h2>" in page
    assert "<th>theirs_held</th>" in page


def test_commands_and_axes_are_listed(place: Path) -> None:
    assert "greet    say who is there" in printed("--help", place=place)
    assert printed("greet", place=place) == "the outsider is here\n"
    helped = printed("run", "--help", place=place)
    assert re.search("theirs_clip=null +the norm that gradients are clipped to", helped)


def test_sweeps_are_read_without_the_plug_in(ended: Finished) -> None:
    told = printed("report", str(ended.folder), "--cells")
    assert "6 cells: " in told
    assert "theirs_open" not in told


def printed(*words: str, place: Path = Path(__file__).parent) -> str:
    """Return the output of a command of a process that can import what is in `place`."""
    there = environment(place, DCPBENCH_PLUGINS="")
    return python("-m", "dcpbench", *words, check=True, env=there).stdout
