"""The action of GitHub and the job of GitLab, step by step as a runner runs them."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from support.commands import ROOT, program, python

TUTORIAL = ROOT / "docs" / "tutorials"
BLOCKS = dict(
    re.findall(r"<!-- file: (\S+) -->\n```yaml\n(.*?)```", (TUTORIAL / "own-script.md").read_text(), re.S)
)
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
GATED = "--stop write@step-12:1 --stop kill@15"


def test_files_of_ci_are_valid(tmp_path: Path) -> None:
    for name, schema in (("resume.yml", "github-workflows"), (".gitlab-ci.yml", "gitlab-ci")):
        text = next(block for path, block in BLOCKS.items() if path.endswith(name))
        assert len(text.splitlines()) <= 15
        (tmp_path / name).write_text(text)
        done = python("-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", tmp_path / name)
        assert done.returncode == 0, done.stdout
    done = python("-m", "check_jsonschema", "--builtin-schema", "vendor.github-actions", ROOT / "action.yml")
    assert done.returncode == 0, done.stdout
    used = [step["uses"] for step in ACTION["runs"]["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", one) for one in used), used


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a job, with the programs of this environment."""
    (folder / "train.py").write_text((TUTORIAL / "train.py").read_text())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "GITHUB_STEP_SUMMARY": str(folder / "summary.md")}


@pytest.mark.slow
def test_action_reports_a_script_that_is_wrong(tmp_path: Path) -> None:
    (step,) = (step for step in ACTION["runs"]["steps"] if step["name"] == "Check")
    inputs = {"COMMAND": "python train.py --out {out}", "GATE": "kill,term,rank", "FOLDER": "found"}
    known = environment(tmp_path) | inputs | {"OPTIONS": GATED}
    done = program("bash", "-eo", "pipefail", "-c", step["run"], cwd=tmp_path, env=known)
    assert done.returncode == 1, done.stdout + done.stderr
    summary = (tmp_path / "summary.md").read_text()
    for text in (
        "| kill\\@15 | fail |",
        "the batch is that of step 1",
        "likely: the sampler's position",
        "again: ",
    ):
        assert text in summary
    kept = [path for path in (tmp_path / "found").rglob("*") if path.suffix == ".pt"]
    assert (kept, next((tmp_path / "found").glob("*/issue.md")).is_file()) == ([], True)


@pytest.mark.slow
def test_job_of_gitlab_gates_some_kinds_of_stops(tmp_path: Path) -> None:
    """The script refuses what is torn, which is not in the gate."""
    _, _, *lines = yaml.safe_load(BLOCKS[".gitlab-ci.yml"])["resume"]["script"]
    known = environment(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(path.read_text().replace("iter(batches)", "iter(batches[first:])"))
    words = shlex.join(["--stop=torn@step-12:1", "--stop=kill@15"])
    script = "\n".join(lines).replace("--gate", f"{words} --gate")
    done = program("bash", "-eo", "pipefail", "-c", script, cwd=tmp_path, env=known)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 stops" in (tmp_path / "check" / "summary.md").read_text()
    assert ", 1 not in --gate; page: check/report.html" in done.stdout
    assert "1 of 2 stops exact" in done.stdout
