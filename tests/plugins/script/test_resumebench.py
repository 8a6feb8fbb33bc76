"""Verdicts on the scripts of ResumeBench, with ranks that are forked from this process."""

import contextlib
import importlib.util
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from conftest import TESTS, tiered
from dcpbench.plugins.script import script

pytestmark = pytest.mark.slow

BENCH = TESTS.parent / "benchmarks" / "resumebench"
CASES = {
    " ".join(str(case[key]) for key in ("script", "stop", "ranks", "resume_args") if key in case): case
    for case in json.loads((BENCH / "cases.json").read_text())
}
NO_FORKS = ("spawned", "parts", "-m", "keeps.py . ")
"""Scripts with spawned ranks, with modules of their own, or without {out}, which no forked command has."""
KEPT = (
    "plain.py kill@15",
    "plain.py saves_into_memory write@step-12:1",
    "plain.py sorted_as_text kill@15",
    "plain.py no_generator kill@11",
    "plain.py epoch_not_restored kill@11",
    "plain.py torn@step-12:2",
    "plain.py no_optimizer kill@10",
    "raw.py takes_what_there_is torn@weights.bin:3",
    "extras.py kill@8",
    "extras.py no_scaler kill@8",
    "extras.py average_restarts kill@8",
    "extras.py saves_between kill@10",
    "habits.py fake_step kill@11",
    "habits.py thread kill@11",
    "habits.py sigterm no_optimizer term@7",
    "habits.py between kill@9",
    "habits.py elsewhere kill@11",
    "habits.py backup no_optimizer kill@7",
    "habits.py backup write@last.pt:3",
    "habits.py other_order kill@11",
    "ddp.py other_weights_on_rank_1 kill@8 2",
    "fsdp2.py {out} async kill@13 2",
    "fsdp2.py {out} sync forgets_set kill@11 2",
    "fsdp1.py {out} full offloads kill@8 2",
    "compiled.py {out} in_place kill@8",
)


@pytest.mark.parametrize("name", tiered(CASES, *KEPT))
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
        monkeypatch.setattr(script, "Command", ForkedCommand)
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
