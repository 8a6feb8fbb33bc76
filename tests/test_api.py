"""The public interface: a check, a sweep and an audit from Python; what it refuses; the schema of rows."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from conftest import ONE_STEP, TESTS, alive_in, hanging, wait_for
from dcpbench import api
from dcpbench.config.overrides import overrides
from dcpbench.core.checks import CHECKS
from dcpbench.core.notes import Note
from dcpbench.core.plugins import plugins
from dcpbench.records.store import ResultsError
from dcpbench.sweep.folder import SweepRecord
from report.sweeps import cell, folder_with
from support import own_workload
from support.commands import ROOT, python
from support.drivers import environment
from support.pretended_engine import PRETENDED

PUBLIC = """
AxisSpec Cell CellsFailedError CheckSpec Checkpointer CommandSpec Compared Component Config ConfigError Defect
Engine Executor ExecutorConfig Expect FaultConfig MetricSpec Mismatch ParallelConfig Plugin Problem Ranks
Result
SaveConfig ScenarioConfig Skip StageConfig StorageConfig TextSpec Trainer Workload audit check
engine read_sweep script sweep
"""
WITHOUT_RANKS = dict([PRETENDED.split("=")])
SMALL = {"device": "cpu", "world_size": 1, "saves": 1, **dict(word.split("=") for word in ONE_STEP)}
CONF = TESTS / "conf"
SCHEMA_FILE = Path(api.__file__).with_name("results.schema.json")


def test_public_names_are_pinned() -> None:
    assert api.__all__ == PUBLIC.split()
    assert {name for name in PUBLIC.split() if not callable(getattr(api, name))} == set()
    with pytest.raises(AttributeError, match=r"dcpbench\.api\.chek: chek: no installed plug-in provides it"):
        _ = api.chek


def test_importing_the_api_imports_no_torch() -> None:
    code = "import sys; from dcpbench import api; api.Plugin; api.AxisSpec; print(*sys.modules)"
    ended = python("-c", code, check=True)
    modules = ended.stdout.split()
    assert "dcpbench.core.plugins" in modules
    assert {*modules} & {"torch", "pandas"} == set()


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "there.py").write_text(text)
    return tmp_path / "there.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "keys", "told"),
    [
        (lambda: None, {}, "ranks cannot import a closure, lambda or object"),
        ("nowhere.py::build", {}, "there is no file nowhere.py"),
        (None, {"save": ["sync", "async"]}, "check runs one cell; use sweep"),
        (None, {"experiment": "seeds"}, "check runs one cell; use sweep"),
        (None, {"paralel": "ddp"}, "paralel: unknown key; did you mean parallel?"),
    ],
)
def test_wrong_arguments_get_one_line(build, keys, told, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(api.ConfigError) as raised:
        api.check(build, folder=tmp_path / "sweep", **keys)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "sweep").exists()


def test_a_function_of_a_notebook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_workload.build, "__module__", "__main__")
    with pytest.raises(api.ConfigError, match="ranks cannot import a function of a notebook or script"):
        api.check(own_workload.build)


def test_options_stay_what_they_are() -> None:
    options = {"groups": [{"lr": 1}], "map": {"a.b": {"0": 1}}, "by": {0: 1}, "empty": {}, "of": {"0": None}}
    with pytest.raises(api.ConfigError, match=r"^model\.options\.map='0': cannot be a name in a mapping"):
        overrides({"model.options": options})
    options["map"] = {"a.b": {}}
    assert overrides({"model.options": options}) == [
        "++model.options.groups=[{lr:1}]",
        "++model.options.map={a.b:{}}",
        "++model.options.by={0:1}",
        "++model.options.empty={}",
        "++model.options.of.0=null",
    ]
    assert overrides({"model.options": {"a b": 1}}) == ["++model.options={a\\ b:1}"]
    with pytest.raises(api.ConfigError, match=r"^seed=range\(0, 3\): must be a number"):
        api.check(seed=range(3))


@pytest.mark.slow
def test_check_passes_for_a_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an event loop running, and colors requested where there is no terminal, as in a notebook."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    mismatch = {"name": "a", "problems": ["missing"], "by": "absent"}
    idle = {"id": "lost", "torch": ">=2", "cells": {}, "reason": "x", "checks": {"model_equal": [mismatch]}}
    (known := tmp_path / "known.yaml").write_text(json.dumps([idle]))

    async def main() -> api.Result:
        keys = {"parallel": "ddp", "known_failures": known, **SMALL, **WITHOUT_RANKS}
        return api.check(own_workload.build, folder=tmp_path / "sweep", **keys)

    with pytest.warns(UserWarning, match=r"known\.yaml: lost: ") as warned:
        result = asyncio.run(main())
    assert [Path(each.filename) for each in warned] == [Path(__file__)]
    result.raise_if_failed()
    assert result.ok
    (row,) = result.rows.to_dict("records")
    assert (row["status"], row["parallel"], row["model"]) == ("pass", "ddp", "support.own_workload.build")
    messages = capsys.readouterr().err
    assert "[1/1] pass" in messages
    assert "lost" not in messages, "it is a warning"
    assert "\x1b" not in messages, "no progress bar"
    assert "\n1 cell: 1 pass\n" in str(result)
    assert re.search(rf"^\| +pass +\| {len(CHECKS)} passed", result._repr_markdown_(), re.MULTILINE)
    again = api.read_sweep(tmp_path / "sweep")
    assert (again.ok, again.rows["cell"].tolist()) == (True, result.rows["cell"].tolist())


@pytest.mark.slow
def test_sweep_reports_failed_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a file and a name in it, with options, below `outputs/`."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.py").write_text(
        "import torch\n"
        "from dcpbench.api import Workload\n"
        "def build(width):\n"
        "    model = torch.nn.Linear(width, width)\n"
        "    batch = lambda generator: torch.randn(8, width, generator=generator)\n"
        "    return Workload(model, batch, lambda model, share: model(share).square().mean())\n"
    )
    monkeypatch.chdir(tmp_path)
    result = api.sweep(
        "models/mine.py::build", options={"width": 6}, config_dir=CONF, scenario=["save_load", "raises"],
        parallel="ddp", retry=0, keep_checkpoints="all", **SMALL,
    )  # fmt: skip
    assert not result.ok
    assert result.folder.parent == tmp_path / "outputs"
    with pytest.raises(AssertionError) as raised:
        result.raise_if_failed()
    head, *lines = str(raised.value).splitlines()
    assert head == f"1 of 2 cells failed ({result.folder})"
    line, again = lines
    assert line == "  scenario=raises parallel=ddp: vacuous: no check applied"
    assert again.startswith("    again: ")
    assert "scenario=raises" in again
    (audited,) = api.audit(result.folder)
    assert audited.state == "complete"
    assert len(repr(audited)) < 300
    # Rows that were really written are what the schema says.
    rows = [json.loads(line) for line in (result.folder / "results.jsonl").read_text().splitlines()]
    schema = json.loads(SCHEMA_FILE.read_text())
    for row in rows:
        jsonschema.validate(row | {"a column of later": 1}, schema)
    for wrong in ({"status": "fine"}, {"save_s": "0.1"}, {"schema_version": 99}, {"compile": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(rows[0] | wrong, schema)


@pytest.mark.slow
@pytest.mark.parametrize("block", ["if True", "with api.engine()"])
def test_ctrl_c_ends_the_ranks(block: str, tmp_path: Path) -> None:
    code = f"""
from dcpbench import api
{block}: api.sweep(scenario=["save_load", "hangs"], parallel="ddp", device="cpu", world_size=2, saves=1,
    model="short", train_steps=1, resume_steps=1, config_dir={str(CONF)!r},
    folder={str(tmp_path / "sweep")!r})
"""
    words = [sys.executable, "-c", code]
    caller = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment())
    wait_for(lambda: hanging(tmp_path / "sweep"))
    caller.send_signal(signal.SIGINT)
    _, said = caller.communicate(timeout=60)
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert alive_in(tmp_path / "sweep") == []
    interrupted = api.read_sweep(tmp_path / "sweep")
    assert not interrupted.ok
    with pytest.raises(api.CellsFailedError, match="the sweep is not complete"):
        interrupted.raise_if_failed()


STARTS = """
import os, sys
with open(os.environ["STARTS"], "a") as file:
    file.write(" ".join(sys.orig_argv) + chr(10))
"""
"""A module that Python imports when it starts."""


@pytest.mark.slow
def test_sweeps_of_an_engine_import_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = tmp_path / "starts"
    (tmp_path / "sitecustomize.py").write_text(STARTS)
    monkeypatch.setenv("STARTS", str(starts))
    monkeypatch.setenv("PYTHONPATH", environment(tmp_path)["PYTHONPATH"])
    monkeypatch.chdir(tmp_path)
    model = written(tmp_path, "from support.own_workload import build\n")
    mine = {"build": "there.py::build", "restart": False, **SMALL}
    with api.engine():
        first = api.check(folder="first", **mine)
        model.write_text("def build(): raise ValueError('edited')\n")
        second = api.sweep(folder="second", parallel=["none", "ddp"], **mine)
        with pytest.raises(api.ConfigError, match="did you mean parallel"):
            api.check(paralel="ddp")
    assert first.ok
    assert second.rows["reason"].str.contains("ValueError: edited").tolist() == [True] * 4, "with retries"
    assert api.check(folder="after", **WITHOUT_RANKS, **SMALL).ok
    started = [line for line in starts.read_text().splitlines() if "resource_tracker" not in line]
    assert ["rank.agent" in line for line in started] == [True, False], started


def test_a_result_says_how_its_cells_ended(tmp_path: Path) -> None:
    cells = [cell(), cell("fsdp", repeat=0), cell("fsdp", repeat=1), cell("hsdp", status="fail")]
    folder = folder_with(tmp_path / "it's", *cells)
    assert repr(api.read_sweep(folder)) == f'Result("{folder}": 3 cells in 4 runs: 3 pass, 1 fail)'
    names = [*(each.cell for each in cells), "parallel=none", "parallel=hsdp2"]
    SweepRecord([], str(tmp_path), {name: [] for name in names}, []).write(folder)
    assert repr(api.read_sweep(folder)).endswith(": 3 cells in 4 runs: 3 pass, 1 fail, 2 left)")
    assert repr(api.Result(tmp_path, 1)) == (
        f"Result('{tmp_path}': ResultsError: {tmp_path}: no sweep here (results.jsonl: No such file or "
        "directory))"
    )


def test_an_exception_has_the_likely_cause_and_the_command(tmp_path: Path) -> None:
    named = {"ranks": [{"notes": [Note("in_no_state_dict", "8, resumed 4", name="model.calls").plain()]}]}
    failed = {"status": "fail", "reason": "loss_resume_equal: " + "much " * 200, "loss_resume_equal": False}
    folder = folder_with(tmp_path / "s", cell("fsdp2"), cell("ddp", details=named, **failed))
    with pytest.raises(api.CellsFailedError) as raised:
        api.read_sweep(folder).raise_if_failed()
    head, cause, again = str(raised.value).splitlines()[1:]
    assert head.startswith("  parallel=ddp: fail: loss_resume_equal: much much")
    assert cause == "    likely: model.calls: 8, resumed 4; in no state dict"
    assert again == "    again: dcpbench run parallel=ddp save=sync"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda folder: api.read_sweep(folder).raise_if_failed(), api.CellsFailedError),
        (lambda folder: api.read_sweep(folder / "none"), ResultsError),
        (lambda folder: str(api.Result(folder / "none", 0)), ResultsError),
        (lambda folder: api.check("none.py::build"), api.ConfigError),
        (lambda folder: api.check(parallel=object()), api.ConfigError),
        (lambda folder: api.sweep(seed=[object()], folder=folder), api.ConfigError),
        (lambda folder: api.sweep(options={"a": {None: 1}}), api.ConfigError),
    ],
)
def test_a_failing_test_shows_no_code_of_dcpbench(
    call: Callable[[Path], object], error: type[Exception], tmp_path: Path
) -> None:
    folder = folder_with(tmp_path / "sweep", cell(status="fail", reason="a differs"))
    with pytest.raises(error) as raised:
        call(folder)
    shown = [entry.path for entry in raised.traceback if not entry.ishidden(raised)]
    assert shown == [Path(__file__)] * 2, "this function and the lambda"


@pytest.mark.skipif(
    not any("audit" in plugin.public for plugin in plugins()), reason="the plug-in audit is absent"
)
def test_an_audit_of_no_checkpoint_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no DCP or safetensors checkpoint here"):
        api.audit(tmp_path)


def test_the_schema_is_that_of_the_registries() -> None:
    """`scripts/results_schema.py` prints it; columns of a deleted plug-in can be left over."""
    own = {name: value for name, value in os.environ.items() if name != "DCPBENCH_PLUGINS"}
    ended = python(str(ROOT / "scripts/results_schema.py"), check=True, env=own)
    made, shipped = json.loads(ended.stdout), json.loads(SCHEMA_FILE.read_text())
    absent = shipped["properties"].keys() - made["properties"].keys()
    here = {f"of the plug-in {plugin.name}" for plugin in plugins()}
    assert {
        name for name in absent if shipped["properties"][name].get("$comment", "") in {"", *here}
    } == set()
    shipped["properties"] = {name: it for name, it in shipped["properties"].items() if name not in absent}
    assert made == shipped
    jsonschema.Draft202012Validator.check_schema(shipped)
