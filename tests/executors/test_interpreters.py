"""Ranks under an interpreter other than the driver's, in a separate environment with the same torch."""

import stat
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from conftest import SMALL, Finished, run
from dcpbench.compose.limits import resolve, why_skip
from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import TimeoutsConfig
from dcpbench.executors.interpreters import interpreter, versions_of
from dcpbench.executors.local import LocalExecutor
from dcpbench.executors.machine import Machine
from dcpbench.rank.messages import CellSpec, RunId, WorldSpec
from support.alone import config
from support.notes import texts

CELL = ("device=cpu", "parallel=fsdp2", "world_size=2", "saves=1", *SMALL)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Create an interpreter that imports the packages of this one."""
    folder = tmp_path_factory.mktemp("other") / "env"
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def loaded(other: str, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("versions") / "sweep"
    return run(folder, "scenario=convert", "verify=deep", f"load_python={other}", *CELL)


@pytest.mark.slow
def test_loading_stages_use_the_other_interpreter(loaded: Finished, other: str) -> None:
    version = f"{other}: torch {torch.__version__}"
    (row,) = loaded.rows
    assert row["status"] == "pass", row["reason"]
    assert row["load_torch_version"] == row["torch_version"] == torch.__version__
    assert row["load_python_version"] == row["python_version"]
    assert row["config"]["load_python"] == other
    ranks = row["details"]["ranks"]
    assert not any(texts(report, "left_behind") for report in ranks)
    ran = [(report["rank"], report["interpreter"]) for report in ranks]
    assert ran == [(rank, python) for rank in (0, 1) for python in (None, None, version)], "three stages"
    assert row["loss_resume_equal"] is True, "the same torch continues with the same bits"


def test_load_python_needs_a_separate_load() -> None:
    machine = Machine(gpus=0, description={}, has_interpreters=True)
    given = config(load_python="python", save_at=None)
    assert "loads under the Python that saved" in str(why_skip(given, resolve(given, machine), machine))


def _program(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("true", "not a Python interpreter"),
        ("echo hello", "not a Python interpreter"),
        ("""echo '"3.10.4"'; echo '"2.13.0"'""", "is Python 3.10.4; needs Python >= 3.11 with torch >= 2.11"),
        (
            """echo '"3.12.1"'; echo "ModuleNotFoundError: No module named 'torch'" >&2; exit 1""",
            "ModuleNotFoundError: No module named 'torch'; needs Python >= 3.11",
        ),
        ("""echo '"3.12.1"'; echo '"2.10.0+cpu"'""", "has torch 2.10.0+cpu; needs"),
    ],
)
def test_unusable_interpreter_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    program = _program(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        versions_of(program)
    assert str(error.value).startswith(f"load_python={program}: {message}")
    with pytest.raises(
        ConfigError, match=r"^load_python=/no/such: cannot be run: No such file or directory$"
    ):
        versions_of("/no/such")


def test_interpreter_that_exits_is_an_error(tmp_path: Path) -> None:
    python = _program(tmp_path, "exit 3")
    ranks = LocalExecutor({python: interpreter(python, ())})
    spec = CellSpec(RunId("tests", "cell", 0), config(), str(tmp_path), str(tmp_path))
    end = ranks.run(WorldSpec(1, "cpu", False, python=python), spec, TimeoutsConfig(), lambda *phase: None)
    assert end.not_run == f"the ranks under {python} could not be started: the process that forks them exited"
    assert end.skip is None
    ranks.end()


def test_agent_ends_with_its_driver() -> None:
    agent = interpreter(sys.executable, ())
    agent.start()
    assert isinstance(agent._process, subprocess.Popen)
    agent._door.close()
    assert agent._process.wait(30) == 0
