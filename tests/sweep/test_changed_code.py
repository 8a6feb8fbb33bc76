"""A user's model in a git checkout is edited between two runs of a sweep: everything says so."""

import json
import os
import shutil
from pathlib import Path

import pytest

from conftest import Command, dcpbench, resume, run, words_of
from support.commands import git
from support.pretended_engine import PRETENDED

CELLS = ("-m", "workload.target=my_gpt.build,null", "parallel=none", "device=cpu", "world_size=1", PRETENDED)


@pytest.mark.slow
def test_edited_model_is_named(tmp_path: Path, command: Command) -> None:
    model, folder = tmp_path / "my_gpt.py", tmp_path / "outputs/new"
    model.write_text("from support.own_workload import build\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "my_gpt.py")
    git(tmp_path, "commit", "--quiet", "--message", "model")
    commit = git(tmp_path, "rev-parse", "HEAD")
    first = dcpbench(*words_of(folder, *CELLS), folder=folder, cwd=tmp_path)
    assert [one["status"] for one in first.rows] == ["pass", "pass"], first.err
    ours = first.rows[0]["dcpbench_commit"]
    assert [one["target_commit"] for one in first.rows] == [commit, None]
    known = json.loads((folder / "environment.json").read_text())
    assert (known["target_commit"], known["dcpbench_commit"]) == (commit, ours)
    assert [*known["code"]["my_gpt"]["files"]] == ["my_gpt.py"]

    shutil.copytree(folder, folder.with_name("before"))
    model.write_text("from support.own_workload import build  # edited\n")
    again = resume(folder, PRETENDED, cwd=tmp_path, reports=True)
    changes = f"(commit {commit[:12]}, now with uncommitted changes)"
    assert f"resume: 1 cell again: the source of my_gpt.py has changed {changes}" in again.err.splitlines()
    assert "resume: 1 of 2 cells are done" in again.err
    assert [one["target_commit"] for one in again.rows] == [f"{commit}-dirty", None]
    assert json.loads((folder / "environment.json").read_text())["earlier"][0]["target_commit"] == commit

    text = " ".join(command("compare", folder.with_name("before"), folder).lines)
    assert text.startswith(f"Your code changed: my_gpt.py {changes}. ")
    history = command("history", folder.parent).out
    assert f"new, commit {commit[:8]} → {commit[:8]}-dirty, torch" in history
    page = (folder / "report.html").read_text()
    assert f"<span>target commit {commit[:12]}-dirty</span><span>dcpbench commit {ours[:12]}" in page


UNUSED = """
from dcpbench.api import CheckSpec, Plugin
plugin = Plugin(name="unused", api=1, columns=(CheckSpec("unused_held", "a check", probe=print),) * {probes})
"""


@pytest.mark.slow
@pytest.mark.parametrize("probes", [0, 1])
def test_installed_plugin_changes_no_finished_cell(
    probes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    words = ("parallel=ddp,fsdp2", "device=cpu", "world_size=2", PRETENDED)
    assert run(folder, *words).status == 0
    (tmp_path / "unused.py").write_text(UNUSED.format(probes=probes))
    monkeypatch.setenv("DCPBENCH_PLUGINS", "unused")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    for _ in range(2):
        again = resume(folder)
        assert "resume: 2 of 2 cells are done" in again.err.splitlines(), again.err
        assert " again: " not in again.err
