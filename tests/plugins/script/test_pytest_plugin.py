"""The fixture of pytest: a script and a model that are checked in tests, and what starting pytest imports."""

import os
import sys
from pathlib import Path

import pytest

from conftest import TESTS
from dcpbench import api
from support.commands import python

pytestmark = pytest.mark.slow
BENCH = TESTS.parent / "benchmarks" / "resumebench"
TEST = f"""
def test_script(resume_check):
    resume_check(["python", "{BENCH}/plain.py", "{{out}}", "no_optimizer"], stops=["kill@11"], grace=5)

def test_model(resume_check):
    result = resume_check("dummy", device="cpu", world_size=1, saves=1, train_steps=1, resume_steps=1)
    assert result.ok
"""


def test_failing_check_explains_itself(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TEST)
    without = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words = ["-m", "pytest", "-p", "dcpbench.pytest_plugin", "--rootdir=.", "-rP", "--dcpbench-dir=found"]
    ended = python(*words, "test_mine.py", cwd=tmp_path, env=without)
    assert (ended.returncode, "1 failed, 1 passed" in ended.stdout) == (1, True), ended.stdout
    assert f"1 of 1 stop failed ({tmp_path}/found/test_mine.py-test_script)" in ended.stdout
    assert "kill@11: fail: diverges: step 9, rank 0: optimizer state missing: 0.weight.step" in ended.stdout
    assert "likely: the optimizer's state is not restored" in ended.stdout
    assert "dcpbench script --stop=kill@11 -- python" in ended.stdout
    assert ended.stdout.count("Captured dcpbench call") == 2, "the rows of the failed and of the passed check"
    assert "1 cell: 1 pass" in ended.stdout
    assert "api.py:" not in ended.stdout, "no frame of dcpbench"
    assert api.read_sweep(tmp_path / "found" / "test_mine.py-test_script").exit_status == 1


def test_start_of_pytest_imports_nothing_heavy() -> None:
    code = "import pytest, sys; before = {*sys.modules}; import dcpbench.pytest_plugin; "
    ended = python("-c", f"{code}print(*{{*sys.modules}} - before)", check=True)
    assert {*ended.stdout.split()} == {"dcpbench", "dcpbench.pytest_plugin"}


def test_stop_that_is_not_reached_fails(tmp_path: Path) -> None:
    command = [sys.executable, BENCH / "plain.py", "{out}"]
    result = api.script(command, stops=["kill@99"], folder=tmp_path / "x")
    assert (result.ok, result.rows["verdict"].tolist()) == (False, ["not_reached"])
    with pytest.raises(AssertionError, match="every stop was skipped"):
        result.raise_if_failed()
    with pytest.raises(api.ConfigError, match="No such option"):
        api.script(command, folder=tmp_path / "y", stop="kill@9", timout=3)
