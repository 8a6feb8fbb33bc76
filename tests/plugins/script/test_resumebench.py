"""Verdicts on the scripts of ResumeBench, with ranks that are forked from this process."""

import contextlib
import importlib.util
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from conftest import TESTS
from dcpbench.plugins.script import script

pytestmark = pytest.mark.slow

BENCH = TESTS.parent / "benchmarks" / "resumebench"
CASES = {
    " ".join(str(case[key]) for key in ("script", "stop", "ranks", "resume_args") if key in case): case
    for case in json.loads((BENCH / "cases.json").read_text())
}
NO_FORKS = ("spawned", "parts", "-m", "keeps.py . ")
"""Scripts with spawned ranks, with modules of their own, or without {out}, which no forked command has."""


@pytest.mark.parametrize("name", CASES)
def test_verdict(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from .forked import ForkedCommand

    spec = importlib.util.spec_from_file_location("resumebench", BENCH / "run.py")
    assert spec
    assert spec.loader
    bench: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    out, case = io.StringIO(), CASES[name]
    if package := bench.missing(case):
        pytest.skip(f"{package} is not installed: make test-frameworks")
    if not name.startswith(NO_FORKS):
        monkeypatch.setattr(script, "ScriptCommand", ForkedCommand)
        monkeypatch.setattr(script, "_LEAST_LIMIT_S", 20.0)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(bench.working_folder(case, tmp_path / "work"))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = script.main(
            bench.command(case),
            [case["stop"]],
            every=case.get("every", 1),
            timeout=200,
            grace=8,
            resume_args=shlex.split(case.get("resume_args", "")),
            folder=str(tmp_path / "results"),
            as_json=True,
        )
    (row,) = json.loads(out.getvalue())
    assert bench.wrong(case, row, status) == [], row["reason"]
